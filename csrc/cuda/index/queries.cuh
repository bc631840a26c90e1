// Queries as the first factor of m16n8k16, heads as its rows.
//
// They are f16, divided by a power of two for each head, which makes the largest number of a row 2^14 to 2^15. An fp32
// number is rounded by at most 2^-11 of it or 2^-39 of the row's largest, whichever is more; a bf16 number above 2^-31
// of the row's largest is exact. The power of two multiplies the head's weight instead.
//
// The order of dims in the sum is free as long as both factors have the same one. A lane's part of a key is what it can
// read in pieces of 16 bytes, and the queries follow: `sum_position`.
#pragma once

#include <cstdint>

#include "cuda/common/e4m3.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/index/problem.h"
#include "mla/number.h"

namespace mla::cuda::index {

// 16 bytes longer than its numbers, so that the eight rows of an ldmatrix tile lie in different banks.
struct QueryRow {
  alignas(16) uint16_t numbers[kIndexDim + 8];  // in the order of the sum
};

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

// The position in the sum of four neighbouring dims, 4 * `four` and so on: the first two are here, the others 8
// further.
template <KeyNumber kKeys>
__device__ __forceinline__ int sum_position(int four) {
  // a lane's piece of a key serves so many steps, a lane has every fourth
  constexpr int kPieceSteps = 16 / (key_value_bytes(kKeys) / (kIndexDim / 4));
  const int step = four / (4 * kPieceSteps) * kPieceSteps + four % kPieceSteps, owner = four / kPieceSteps % 4;
  return 16 * step + 2 * owner;
}

// One warp stores kRows heads, from `head` on and so far apart, of a token to shared memory; beyond the last head they
// are zeros. `weights` gets each head's weight, times what its queries were divided by.
template <KeyNumber kKeys, int kRows>
__device__ __forceinline__ void stage_queries(const Problem& p, int64_t token, int head, int apart, QueryRow* rows,
                                              float* weights) {
  const int lane = threadIdx.x % 32;
  const int64_t first = token * p.query_token + 4 * lane;
  float numbers[kRows][4], weight[kRows];
  const auto load_rows = [&](auto load) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int own = head + i * apart;
      weight[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) numbers[i][j] = 0.0f;
      if (own >= p.heads) continue;
      weight[i] = p.weights[token * p.weight_token + own];
      load(first + own * p.query_head, numbers[i]);
    }
  };
  // no switch: for one nvcc uses 40 registers more, and spills
  if (p.query_number == QueryNumber::fp32) {
    const float* queries = static_cast<const float*>(p.queries);
    if (p.queries_aligned)
      load_rows([&](int64_t at, float (&to)[4]) {
        const float4 four = *reinterpret_cast<const float4*>(queries + at);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      });
    else
      load_rows([&](int64_t at, float (&to)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = queries[at + j];
      });
  } else if (p.query_number == QueryNumber::bf16) {
    const uint16_t* queries = static_cast<const uint16_t*>(p.queries);
    if (p.queries_aligned)
      load_rows([&](int64_t at, float (&to)[4]) {
        const uint2 four = *reinterpret_cast<const uint2*>(queries + at);
        to[0] = bits_float(four.x << 16), to[1] = bits_float(four.x & 0xffff0000u);
        to[2] = bits_float(four.y << 16), to[3] = bits_float(four.y & 0xffff0000u);
      });
    else
      load_rows([&](int64_t at, float (&to)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = bf16_to_float(queries[at + j]);
      });
  } else {
    const uint8_t* queries = static_cast<const uint8_t*>(p.queries);
    load_rows([&](int64_t at, float (&to)[4]) {
      uint32_t four = 0, pairs[2];
      if (p.queries_aligned) {
        four = *reinterpret_cast<const uint32_t*>(queries + at);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) four |= uint32_t{queries[at + j]} << 8 * j;
      }
      e4m3_to_f16(four, pairs);
      const float2 low = unpack_f16(pairs[0]), high = unpack_f16(pairs[1]);
      to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
    });
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = max(largest, float_bits(numbers[i][j]) & 0x7fffffffu);
    const Balance balance(__reduce_max_sync(~0u, largest) >> 23);
    const float m = balance.multiplier;
    uint16_t* to = rows[i * apart].numbers + sum_position<kKeys>(lane);
    *reinterpret_cast<uint32_t*>(to) = pack_f16(numbers[i][0] * m, numbers[i][1] * m);
    *reinterpret_cast<uint32_t*>(to + 8) = pack_f16(numbers[i][2] * m, numbers[i][3] * m);
    if (lane == 0) weights[i * apart] = weight[i] * balance.factor;
  }
}

// A lane's part of 16 rows, for all steps, and its two rows' weights.
__device__ __forceinline__ void load_queries(const QueryRow* rows, const float* weights, uint32_t (&a)[kSteps][4],
                                             float (&weight)[2]) {
  const int lane = threadIdx.x % 32;
  const auto address = cast_smem_ptr_to_uint(rows[lane % 16].numbers + 8 * (lane / 16));
#pragma unroll
  for (int step = 0; step < kSteps; ++step) load_tiles(a[step], address + 32 * step);
  weight[0] = weights[lane / 4], weight[1] = weights[lane / 4 + 8];
}

}  // namespace mla::cuda::index
