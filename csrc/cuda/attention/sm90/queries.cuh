// Loads one token's queries to shared memory, as operand B (swap_ab) or A (m64) of the score product.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/common/pairs.cuh"
#include "mla/number.h"

namespace mla::cuda::sm90 {

// Two bf16 numbers times a power of two, as f16 or bf16.
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float factor, bool to_f16) {
  const float first = __uint_as_float(pair << 16) * factor, second = __uint_as_float(pair & 0xffff0000u) * factor;
  return to_f16 ? pack_f16(first, second) : pack_bf16(first, second);
}

__device__ __forceinline__ uint4 scaled_piece(uint4 piece, float factor, bool to_f16) {
  return {scaled_pair(piece.x, factor, to_f16), scaled_pair(piece.y, factor, to_f16),
          scaled_pair(piece.z, factor, to_f16), scaled_pair(piece.w, factor, to_f16)};
}

// The largest magnitude so far and of two bf16 numbers, in the lower half. The upper half holds garbage.
__device__ __forceinline__ uint32_t larger_magnitude(uint32_t pair, uint32_t largest) {
  return max(max(pair & 0x7fffu, pair >> 16 & 0x7fffu), largest);
}

// The biased exponent of the power of two that a warp's head is divided by: that of its largest latent number. Rope is
// divided by the same power. If it is larger by more than 2^kRopeRoom, the exponent grows, so that rope stays finite.
template <uint32_t kRopeRoom = 60>
__device__ __forceinline__ uint32_t exponent_of_head(const uint4 (&latent)[2], const uint4& rope) {
  uint32_t largest = 0, largest_rope = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    for (const uint32_t pair : {latent[i].x, latent[i].y, latent[i].z, latent[i].w})
      largest = larger_magnitude(pair, largest);
  for (const uint32_t pair : {rope.x, rope.y, rope.z, rope.w}) largest_rope = larger_magnitude(pair, largest_rope);
  const uint32_t exponent = __reduce_max_sync(~0u, largest) >> 7, of_rope = __reduce_max_sync(~0u, largest_rope) >> 7;
  return max(exponent, max(of_rope, kRopeRoom) - kRopeRoom);
}

// Issues the loads of a token's head by a warp. Zeros beyond the problem's heads.
__device__ __forceinline__ void load_head(uint4 (&latent)[2], uint4& rope, const AttentionProblem& p, int64_t token,
                                          int head, int lane) {
  latent[0] = latent[1] = rope = {};
  if (head >= p.heads) return;
  const auto* nope = reinterpret_cast<const uint4*>(p.q_nope + p.offset(p.q_nope_strides, token, head));
  latent[0] = nope[lane], latent[1] = nope[lane + 32];
  if (lane < 8) rope = reinterpret_cast<const uint4*>(p.q_rope + p.offset(p.q_rope_strides, token, head))[lane];
}

// The score factors, to base 2, of heads 8 * j + 2 * (lane % 4) and the next: a lane's columns.
__device__ __forceinline__ float2 q_scales_of_lane(const float* q_scale, int j, int lane) {
  return *reinterpret_cast<const float2*>(q_scale + 8 * j + 2 * (lane % 4));
}

// Scores of a lane's products: times their heads' scales, plus `bias` of its two tokens.
template <int kCount>
__device__ __forceinline__ void scale_scores(float (&score)[kCount], const float (&products)[kCount],
                                             const float* q_scale, const float (&bias)[2], int lane) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float2 scale = q_scales_of_lane(q_scale, i / 4, lane);
    score[i] = products[i] * (i % 2 ? scale.y : scale.x) + bias[i / 2 % 2];
  }
}

constexpr int kQueryWarps = 8;  // load a token's queries: a warp heads warp, warp + 8, ...

// Eight warps load a token's heads in the layout of a tile's block; a warp loads up to four heads at once. Rows beyond
// the problem's heads are zeros. `wait_for_room` is called when the first loads are in flight.
//
// With fp8_ds_mla rows (kScaled) q is f16. Each head is divided by a power of two that brings its largest latent number
// to 1 to 2, so that f16 holds any bf16 query. q_scale undoes that and brings scores to base 2. Rope is also multiplied
// by `rope_lift`, because cached rope lacks the rows' power of two.
template <bool kScaled, int kHeads, int kBlocks, typename Wait>
__device__ __forceinline__ void load_queries(const AttentionProblem& p, uint8_t (&q)[kBlocks][kHeads * kRowBytes],
                                             float* q_scale, int64_t token, int head_begin, int warp, int lane,
                                             Wait wait_for_room, float rope_lift = 1.0f) {
  constexpr bool kRoped = kBlocks > kLatentBlocks;
  constexpr int kOwn = kHeads / kQueryWarps, kMost = kScaled ? 4 : 2, kAtOnce = kOwn < kMost ? kOwn : kMost;
#pragma unroll 1
  for (int first = warp; first < kHeads; first += kQueryWarps * kAtOnce) {
    uint4 latent[kAtOnce][2], rope = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      latent[i][0] = latent[i][1] = {};
      const int head = head_begin + first + kQueryWarps * i;
      if (head >= p.heads) continue;
      const auto* nope = reinterpret_cast<const uint4*>(p.q_nope + p.offset(p.q_nope_strides, token, head));
      latent[i][0] = nope[lane], latent[i][1] = nope[lane + 32];
    }
    // eight lanes load a head's rope
    const int rope_row = first + kQueryWarps * (lane / 8);
    if (const int head = head_begin + rope_row; kRoped && lane < 8 * kAtOnce && head < p.heads)
      rope = reinterpret_cast<const uint4*>(p.q_rope + p.offset(p.q_rope_strides, token, head))[lane % 8];
    if (first == warp) wait_for_room();
    float rope_factor = 1.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int own = first + kQueryWarps * i;
      float factor = 1.0f, back = 1.0f;
      if constexpr (kScaled) {
        const uint32_t exponent = exponent_of_head(latent[i], lane / 8 == i ? rope : uint4{});
        if (exponent > 0 && exponent < 254) {
          factor = __uint_as_float((254 - exponent) << 23);
          back = __uint_as_float(exponent << 23);
        }
        if (lane / 8 == i) rope_factor = factor;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int block = lane / 8 + 4 * j;
        *reinterpret_cast<uint4*>(q[block] + own * kRowBytes + offset_of_piece(block, lane % 8, own)) =
            kScaled ? scaled_piece(latent[i][j], factor, true) : latent[i][j];
      }
      if (lane == 0) q_scale[own] = p.scale * kLog2E * back;
    }
    // two steps: the product of both factors may overflow fp32
    if constexpr (kScaled) rope = scaled_piece(scaled_piece(rope, rope_factor, false), rope_lift, false);
    if (kRoped && lane < 8 * kAtOnce)
      *reinterpret_cast<uint4*>(q[kBlocks - 1] + rope_row * kRowBytes +
                                offset_of_piece(kLatentBlocks, lane % 8, rope_row)) = rope;
  }
}

// Prefetches a token's queries to L2, by kWarps warps.
template <int kHeads, int kWarps, int kBlocks>
__device__ __forceinline__ void ask_l2_for_queries(const AttentionProblem& p, int64_t token, int head_begin, int warp,
                                                   int lane) {
  constexpr int kWarpHeads = kHeads / kWarps, kLanes = 32 / kWarpHeads;  // per warp; per head
  constexpr int kLine = 64, kLines = kLatent / kLine / kLanes;           // numbers of a cache line; lines per lane
  const int head = head_begin + warp * kWarpHeads + lane % kWarpHeads;
  if (head >= p.heads) return;
  const auto ask = [](const uint16_t* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); };
  const uint16_t* nope = p.q_nope + p.offset(p.q_nope_strides, token, head) + lane / kWarpHeads * kLines * kLine;
#pragma unroll
  for (int i = 0; i < kLines; ++i) ask(nope + i * kLine);
  if (kBlocks > kLatentBlocks && lane < kWarpHeads) ask(p.q_rope + p.offset(p.q_rope_strides, token, head));
}

}  // namespace mla::cuda::sm90
