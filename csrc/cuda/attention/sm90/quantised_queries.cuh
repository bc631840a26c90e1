// Loads one token's queries to shared memory, quantised to pairs of e4m3 numbers.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/queries.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/pairs.cuh"

namespace mla::cuda::sm90 {

// Two bf16 numbers times a factor, each as the sum of two e4m3 numbers: the rounded value and the rounding error. The
// sum is exact for magnitudes from 2^-2 to 2^8, as bf16 has eight significant bits and e4m3 four. Smaller numbers are
// off by at most 2^-10.
struct Fp8Pair {
  uint32_t high, low;  // two bytes each

  __device__ __forceinline__ Fp8Pair(uint32_t pair, float factor) {
    const float first = __uint_as_float(pair << 16) * factor, second = __uint_as_float(pair & 0xffff0000u) * factor;
    high = to_e4m3x2(first, second);
    uint32_t f16;
    asm("{\n"
        ".reg .b16 fp8;\n"
        "cvt.u16.u32 fp8, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, fp8;\n"
        "}"
        : "=r"(f16)
        : "r"(high));
    const float2 rounded = unpack_f16(f16);
    low = to_e4m3x2(first - rounded.x, second - rounded.y);
  }
};

// The power of two that a head's queries are divided by before they are rounded to e4m3: one that brings the largest
// number (not counting bf16 rope) to 2^7 to 2^8.
template <bool kRopeToo>
struct HeadPower {
  uint32_t biased, exponent;

  __device__ __forceinline__ HeadPower(const uint4 (&latent)[2], const uint4& rope)
      : biased(exponent_of_head<kRopeToo ? 0 : 60>(latent, rope)), exponent(max(biased, 8u)) {}
  // e4m3 would saturate an infinity; NaN shows it
  __device__ __forceinline__ float factor() const {
    return biased == 255 ? NAN : __uint_as_float((261 - exponent) << 23);
  }
  // Undoes that, and brings scores to base 2.
  __device__ __forceinline__ float q_scale(float scale) const {
    return scale * kLog2E * __uint_as_float((exponent - 7) << 23);
  }
};

// Quantises a token's queries. In each group of 128 dims a head is a row of 128 bytes of `fp8`; its rounding errors are
// the row kHeads further on. Groups follow one another. Rope has rows of its own: bf16, or pairs of e4m3 too
// (kRopeToo), 64 bytes a row. Rows beyond the problem's heads are zeros.
template <int kHeads, bool kRopeToo>
struct QuantisedQueries {
  static_assert(kHeads % 8 == 0, "both rows of a head are swizzled alike");
  static constexpr int kWarps = 8;                      // share the heads
  static constexpr int kAtOnce = kHeads == 16 ? 2 : 1;  // heads per warp and step
  static constexpr int kStep = kWarps * kAtOnce;        // heads per step
  static constexpr int kGroupBytes = 2 * kHeads * kRowBytes;
  static constexpr int kRopeBytes = kRopeToo ? kGroupBytes : kHeads * kRowBytes;

  uint4 latent[kAtOnce][2], rope[kAtOnce];

  // Issues the loads of kAtOnce heads, from the CTA's head `first` on.
  __device__ __forceinline__ void load(const AttentionProblem& p, int64_t token, int head_begin, int first, int lane) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load_head(latent[i], rope[i], p, token, head_begin + first + i, lane);
  }

  __device__ __forceinline__ void store(float scale, uint8_t* fp8, uint8_t* rope_rows, float* q_scale, int first,
                                        int lane) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i;
      const HeadPower<kRopeToo> power(latent[i], rope[i]);
      const float factor = power.factor();
#pragma unroll
      for (int j = 0; j < 2; ++j)
        store_pairs(fp8 + (lane / 16 + 2 * j) * kGroupBytes, row, lane % 16, latent[i][j], factor);
      if (kRopeToo && lane < 8)
        store_pairs(rope_rows, row, lane, rope[i], factor);
      else if (lane < 8)
        *reinterpret_cast<uint4*>(rope_rows + row * kRowBytes + offset_in_row(row & 7, lane)) =
            scaled_piece(rope[i], factor, false);
      if (lane == 0) q_scale[row] = power.q_scale(scale);
    }
  }

 private:
  // Stores numbers 8 * eighth to 8 * eighth + 7 of a row.
  static __device__ __forceinline__ void store_pairs(uint8_t* rows, int row, int eighth, const uint4& numbers,
                                                     float factor) {
    const Fp8Pair x(numbers.x, factor), y(numbers.y, factor), z(numbers.z, factor), w(numbers.w, factor);
    uint8_t* at = rows + row * kRowBytes + offset_in_row(row & 7, eighth / 2) + eighth % 2 * 8;
    *reinterpret_cast<uint2*>(at) = {x.high | y.high << 16, z.high | w.high << 16};
    *reinterpret_cast<uint2*>(at + kHeads * kRowBytes) = {x.low | y.low << 16, z.low | w.low << 16};
  }
};

}  // namespace mla::cuda::sm90
