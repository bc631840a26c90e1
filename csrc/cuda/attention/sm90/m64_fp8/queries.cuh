// A head's queries on their way to shared memory, where they are e4m3.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/m64_fp8/config.h"
#include "cuda/attention/sm90/quantised_queries.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/pairs.cuh"

namespace mla::cuda::sm90::m64_fp8 {

// Rounds a head's queries to e4m3, once. Rope may stay bf16. All are divided by a power of two that brings the largest
// number (not counting bf16 rope) to 2^7 to 2^8.
template <bool kRopeToo>
struct RoundedQueries {
  uint4 latent[2], rope;

  // As load_head, in half of its instructions: in sparse attention a token has one query, which needs not be found.
  // Zeros if there is no such head.
  __device__ void load(const AttentionProblem& p, int64_t token, int head, bool valid, int lane) {
    latent[0] = latent[1] = rope = {};
    if (!valid || head >= p.heads) return;
    const uint16_t* nope = p.q_nope + token * p.q_nope_strides.token + head * p.q_nope_strides.head;
    latent[0] = reinterpret_cast<const uint4*>(nope)[lane], latent[1] = reinterpret_cast<const uint4*>(nope)[lane + 32];
    if (lane < 8)
      rope = reinterpret_cast<const uint4*>(p.q_rope + token * p.q_rope_strides.token +
                                            head * p.q_rope_strides.head)[lane];
  }

  // Hidden slots score -inf, so q_scale is positive: queries take the sign of `scale`.
  template <typename Rows>
  __device__ void store(float scale, Rows (&q)[kGroups], Rows& q_rope, float2 (&heads)[2][kHeads], int row,
                        int lane) const {
    const HeadPower<kRopeToo> power(latent, rope);
    const float factor = copysignf(power.factor(), scale), q_scale = power.q_scale(fabsf(scale));
    const uint32_t pair = pack_bf16(factor, factor);
#pragma unroll
    for (int j = 0; j < 2; ++j) store_bytes(q[lane / 16 + 2 * j], row, lane % 16, latent[j], pair);
    if (lane < 8) {
      if (kRopeToo)
        store_bytes(q_rope, row, lane, rope, pair);
      else
        store_piece(q_rope.address(row, lane), times<Number::bf16>(rope, pair));
    }
    constexpr float kLeast = 0x1p-126f;  // scores are as good as 0 then
    if (lane < 2) heads[lane][row].x = q_scale < kLeast ? kLeast : q_scale;
  }

 private:
  // Stores numbers 8 * eighth to 8 * eighth + 7 of a row.
  template <typename Rows>
  static __device__ void store_bytes(Rows& rows, int row, int eighth, const uint4& numbers, uint32_t pair) {
    const uint4 own = times<Number::bf16>(numbers, pair);
    const auto four = [](uint32_t first, uint32_t second) {
      const auto two = [](uint32_t own) -> uint32_t {
        return to_e4m3x2(__uint_as_float(own << 16), __uint_as_float(own & 0xffff0000u));
      };
      return two(first) | two(second) << 16;
    };
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(rows.address(row, eighth / 2) + eighth % 2 * 8),
                 "r"(four(own.x, own.y)), "r"(four(own.z, own.w))
                 : "memory");
  }
};

}  // namespace mla::cuda::sm90::m64_fp8
