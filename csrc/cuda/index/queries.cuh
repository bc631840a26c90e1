// Queries as the first factor of m16n8k16, heads as its rows.
//
// They are f16, divided by a power of two for each head, which makes the largest number of a row 2^14 to 2^15. An fp32
// number is rounded by at most 2^-11 of it or 2^-39 of the row's largest, whichever is more; a bf16 number above 2^-31
// of the row's largest is exact. The power of two multiplies the head's weight instead.
//
// The order of dims in the sum is free as long as both factors have the same one. A lane's part of a key is what it can
// read in pieces of 16 bytes, and the queries follow: `dim_of`.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "cuda/index/problem.h"
#include "mla/number.h"

namespace mla::cuda::index {

// 8 bytes longer than its numbers, so that the eight rows that are read at once lie in different banks.
constexpr int kQueryRow = kIndexDim + 4;

// What rows of a factor become: multiplied by a power of two, and what that takes from them.
struct Balance {
  float multiplier, factor;

  // The row's largest number has this exponent, in fp32's bits.
  __device__ explicit Balance(uint32_t exponent) {
    const uint32_t clamped = max(exponent, 15u);  // so that both powers are normal numbers
    multiplier = __uint_as_float((268 - clamped) << 23);
    factor = __uint_as_float((clamped - 14) << 23);
  }
};

// The first of the four neighbouring dims that a lane has of a step, in a sum over keys whose values have so many
// bytes.
template <bool kCodes>
__device__ __forceinline__ int dim_of(int step, int lane) {
  constexpr int kPieceDims = kCodes ? 16 : 8, kPieceSteps = kPieceDims / 4;
  return step / kPieceSteps * 4 * kPieceDims + lane % 4 * kPieceDims + step % kPieceSteps * 4;
}

struct alignas(8) QueryRow {
  uint16_t numbers[kQueryRow];
};
static_assert(sizeof(QueryRow) == 2 * kQueryRow);

// One warp brings kRows heads, from `head` on and so far apart, of a token to shared memory; beyond the last head they
// are zeros. `weights` gets each head's weight, times what its queries were divided by.
template <int kRows>
__device__ __forceinline__ void stage_queries(const Problem& p, int64_t token, int head, int apart, QueryRow* rows,
                                              float* weights) {
  const int lane = threadIdx.x % 32;
  float numbers[kRows][4], weight[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int own = head + i * apart;
    weight[i] = own < p.heads ? p.weights[token * p.weight_token + own] : 0.0f;
    const int64_t at = token * p.query_token + own * p.query_head + 4 * lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) numbers[i][j] = 0.0f;
    if (own >= p.heads) continue;
    if (p.queries_fp32) {
      const float* from = static_cast<const float*>(p.queries) + at;
      if (p.queries_aligned) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        numbers[i][0] = four.x, numbers[i][1] = four.y, numbers[i][2] = four.z, numbers[i][3] = four.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) numbers[i][j] = from[j];
      }
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(p.queries) + at;
      if (p.queries_aligned) {
        const uint2 four = *reinterpret_cast<const uint2*>(from);
        numbers[i][0] = bits_float(four.x << 16), numbers[i][1] = bits_float(four.x & 0xffff0000u);
        numbers[i][2] = bits_float(four.y << 16), numbers[i][3] = bits_float(four.y & 0xffff0000u);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) numbers[i][j] = bf16_to_float(from[j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = max(largest, float_bits(numbers[i][j]) & 0x7fffffffu);
    const Balance balance(__reduce_max_sync(~0u, largest) >> 23);
    const float m = balance.multiplier;
    *reinterpret_cast<uint2*>(&rows[i * apart].numbers[4 * lane]) = {pack_f16(numbers[i][0] * m, numbers[i][1] * m),
                                                                     pack_f16(numbers[i][2] * m, numbers[i][3] * m)};
    if (lane == 0) weights[i * apart] = weight[i] * balance.factor;
  }
}

// A lane's part of 16 rows, for all steps, and its two rows' weights.
template <bool kCodes>
__device__ __forceinline__ void load_queries(const QueryRow* rows, const float* weights, uint32_t (&a)[kSteps][4],
                                             float (&weight)[2]) {
  const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int dim = dim_of<kCodes>(step, lane);
    const uint2 upper = *reinterpret_cast<const uint2*>(&rows[row].numbers[dim]);
    const uint2 lower = *reinterpret_cast<const uint2*>(&rows[row + 8].numbers[dim]);
    a[step][0] = upper.x, a[step][1] = lower.x, a[step][2] = upper.y, a[step][3] = lower.y;
  }
  weight[0] = weights[row], weight[1] = weights[row + 8];
}

}  // namespace mla::cuda::index
