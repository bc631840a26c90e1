// The backward of sparse attention for every GPU from sm_80 up: a query and 32 heads per CTA, mma.sync. It is meant to
// be right everywhere and simple. A tile's rows are loaded to registers while the tile before is computed.
//
// For each tile of 16 entries:
//   scores         16 heads by 8 entries per warp: four warps compute q . k, four d_out . v
//   find_factors   two entries of a head per thread: P and dS
//   d_q            an eighth of the dims per warp: dS times the rows, accumulated in registers over all tiles
//   contributions  the same dims per warp: dS times q, and P times d_out, over the CTA's heads
#pragma once

#include <cstdint>

#include "cuda/backward/portable/config.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/pairs.cuh"
#include "mla/number.h"

namespace mla::cuda::portable_backward_kernel {

using Atom = cute::SM80_16x8x16_F32BF16BF16F32_TN;

template <int kWidth>
struct Cta {
  static constexpr int kWarpDims = kWidth / kWarps;
  static constexpr int kWarpTiles = kWarpDims / 8;  // of 8 dims
  static constexpr int kRowPieces = kWidth / 8;     // of 16 bytes
  static constexpr int kThreadPieces = (kTile * kRowPieces + kThreads - 1) / kThreads;

  const BackwardProblem& p;
  Shared& s;
  int32_t query;
  int group;
  int warp, lane;

  // A tile's rows in registers, on their way to shared memory.
  struct Staged {
    uint4 piece[kThreadPieces];
    bool valid[kThreadPieces];
  };

  __device__ void load_heads() const {
    const auto load = [&](const uint16_t* from, int64_t stride, int pieces, auto& to) {
      for (int i = threadIdx.x; i < kHeads * pieces; i += kThreads) {
        const int own = i / pieces, dim = i % pieces * 8, head = group * kHeads + own;
        uint4 piece{};
        if (head < p.heads) piece = *reinterpret_cast<const uint4*>(from + head * stride + dim);
        *reinterpret_cast<uint4*>(&to[own][dim]) = piece;
      }
    };
    load(p.q.at(query), p.q.head, kRowPieces, s.q);
    load(p.d_out.at(query), p.d_out.head, kValueDim / 8, s.d_out);
    if (threadIdx.x < kHeads) {
      const int head = group * kHeads + threadIdx.x;
      const int64_t at = query * int64_t{p.heads} + head;
      s.lse2[threadIdx.x] = head < p.heads ? p.lse2[at] : INFINITY;
      s.delta[threadIdx.x] = head < p.heads ? p.delta[at] : 0.0f;
    }
  }

  __device__ void stage(int first, int end, Staged& staged) const {
    const int32_t* indices = p.lists.indices + query * p.lists.stride;
#pragma unroll
    for (int i = 0; i < kThreadPieces; ++i) {
      const int at = threadIdx.x + i * kThreads, entry = first + at / kRowPieces;
      const int32_t row = at < kTile * kRowPieces && entry < end ? indices[entry] : -1;
      staged.valid[i] = p.lists.names(row);
      staged.piece[i] = {};
      if (staged.valid[i])
        staged.piece[i] = *reinterpret_cast<const uint4*>(p.kv + row * p.kv_row + at % kRowPieces * 8);
    }
  }

  // Whether the thread stored a piece of a valid row.
  __device__ bool store(const Staged& staged) const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kThreadPieces; ++i) {
      const int at = threadIdx.x + i * kThreads;
      if (at >= kTile * kRowPieces) break;
      *reinterpret_cast<uint4*>(&s.rows[at / kRowPieces][at % kRowPieces * 8]) = staged.piece[i];
      if (at % kRowPieces == 0) s.valid[at / kRowPieces] = staged.valid[i];
      any |= staged.valid[i];
    }
    return any;
  }

  // One 16 x 8 product over kDims dims.
  template <int kDims, int kStride>
  __device__ void multiply(const uint16_t (&heads)[kHeads][kStride], float (&to)[kHeads][kScoreStride]) const {
    const int head = warp % 4 / 2 * 16, entry = warp % 2 * 8;
    const uint32_t head_address = cast_smem_ptr_to_uint(&heads[head + lane % 16][8 * (lane / 16)]);
    const uint32_t row_address = cast_smem_ptr_to_uint(&s.rows[entry + lane % 8][8 * (lane / 8)]);
    float even[4] = {}, odd[4] = {};  // two chains of products hide latency
#pragma unroll 4
    for (int dim = 0; dim < kDims; dim += 32) {
      uint32_t rows[4], first[4], second[4];
      load_tiles(rows, row_address + 2 * dim);
      load_tiles(first, head_address + 2 * dim);
      load_tiles(second, head_address + 2 * dim + 32);
      mma<Atom>(even, first, rows[0], rows[1]);
      mma<Atom>(odd, second, rows[2], rows[3]);
    }
    float* const upper = &to[head + lane / 4][entry + 2 * (lane % 4)];
    *reinterpret_cast<float2*>(upper) = {even[0] + odd[0], even[1] + odd[1]};
    *reinterpret_cast<float2*>(upper + 8 * kScoreStride) = {even[2] + odd[2], even[3] + odd[3]};
  }

  __device__ void find_factors() const {
    const int head = threadIdx.x / (kTile / 2), entry = threadIdx.x % (kTile / 2) * 2;
    const float2 score = *reinterpret_cast<const float2*>(&s.scores[head][entry]);
    const float2 d_prob = *reinterpret_cast<const float2*>(&s.d_probs[head][entry]);
    const float scale2 = p.scale * kLog2E, lse2 = s.lse2[head], delta = s.delta[head];
    const bool exists = group * kHeads + head < p.heads;
    float prob[2], d_score[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool counts = exists && s.valid[entry + i];
      prob[i] = counts ? exp2f((i ? score.y : score.x) * scale2 - lse2) : 0.0f;
      d_score[i] = counts ? prob[i] * ((i ? d_prob.y : d_prob.x) - delta) * p.scale : 0.0f;
    }
    *reinterpret_cast<uint32_t*>(&s.probs[head][entry]) = pack_bf16(prob[0], prob[1]);
    *reinterpret_cast<uint32_t*>(&s.d_scores[head][entry]) = pack_bf16(d_score[0], d_score[1]);
  }

  // d_q[8-dim tile][16 heads][lane's 4 numbers] += dS x rows.
  __device__ void add_to_d_q(float (&d_q)[kWarpTiles][2][4]) const {
    uint32_t d_scores[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
      load_tiles(d_scores[m], cast_smem_ptr_to_uint(&s.d_scores[16 * m + lane % 16][8 * (lane / 16)]));
#pragma unroll
    for (int n = 0; n < kWarpTiles; n += 2) {
      uint32_t rows[4];  // with an odd number of tiles, the last load reads padding, and half of it is used
      load_tiles_transposed(rows, cast_smem_ptr_to_uint(&s.rows[lane % 16][warp * kWarpDims + 8 * (n + lane / 16)]));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma<Atom>(d_q[n][m], d_scores[m], rows[0], rows[1]);
        if (n + 1 < kWarpTiles) mma<Atom>(d_q[n + 1][m], d_scores[m], rows[2], rows[3]);
      }
    }
  }

  // P or dS of 16 entries by 32 heads, stored head by head, as operand A of two products.
  __device__ void load_by_entry(const uint16_t (&from)[kHeads][kScoreStride], uint32_t (&to)[2][4]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      load_tiles_transposed(to[k],
                            cast_smem_ptr_to_uint(&from[16 * k + lane % 8 + 8 * (lane / 16)][8 * (lane / 8 % 2)]));
  }

  __device__ void contribute(int first) const {
    uint32_t d_scores[2][4], probs[2][4];
    load_by_entry(s.d_scores, d_scores);
    load_by_entry(s.probs, probs);
    const int32_t* indices = p.lists.indices + query * p.lists.stride;
    uint16_t* to[2];  // the lane's two entries; null if invalid
    float* add_to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = lane / 4 + 8 * half, dim = warp * kWarpDims + 2 * (lane % 4);
      to[half] = nullptr, add_to[half] = nullptr;
      if (!s.valid[own]) continue;
      if (p.accumulator)
        add_to[half] = p.accumulator + indices[first + own] * int64_t{kWidth} + dim;
      else
        to[half] = p.contribution(group, query, first + own) + dim;
    }
#pragma unroll
    for (int n = 0; n < kWarpTiles; ++n) {
      const int dim = warp * kWarpDims + 8 * n;
      float sum[4] = {};
      uint32_t heads[4];
      load_tiles_transposed(heads, cast_smem_ptr_to_uint(&s.q[lane][dim]));
      mma<Atom>(sum, d_scores[0], heads[0], heads[1]);
      mma<Atom>(sum, d_scores[1], heads[2], heads[3]);
      if (dim < kValueDim) {
        load_tiles_transposed(heads, cast_smem_ptr_to_uint(&s.d_out[lane][dim]));
        mma<Atom>(sum, probs[0], heads[0], heads[1]);
        mma<Atom>(sum, probs[1], heads[2], heads[3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (to[half]) *reinterpret_cast<uint32_t*>(to[half] + 8 * n) = pack_bf16(sum[2 * half], sum[2 * half + 1]);
        if (add_to[half]) add(add_to[half] + 8 * n, sum[2 * half], sum[2 * half + 1]);
      }
    }
  }

  static __device__ void add(float* to, float first, float second) {
#if __CUDA_ARCH__ >= 900
    atomicAdd(reinterpret_cast<float2*>(to), float2{first, second});
#else
    atomicAdd(to, first), atomicAdd(to + 1, second);
#endif
  }

  __device__ void store_d_q(const float (&d_q)[kWarpTiles][2][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 heads, and their halves of 8
      const int head = group * kHeads + 8 * i + lane / 4;
      if (head >= p.heads) continue;
      uint16_t* to = p.d_q.at(query, head) + warp * kWarpDims + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kWarpTiles; ++n)
        *reinterpret_cast<uint32_t*>(to + 8 * n) = pack_bf16(d_q[n][i / 2][i % 2 * 2], d_q[n][i / 2][i % 2 * 2 + 1]);
    }
  }
};

template <int kWidth>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ BackwardProblem p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int groups = head_groups(p.heads, kHeads);
  const Cta<kWidth> cta{p,
                        s,
                        p.first + static_cast<int32_t>(blockIdx.x / groups),
                        static_cast<int>(blockIdx.x % groups),
                        static_cast<int>(threadIdx.x) / 32,
                        static_cast<int>(threadIdx.x) % 32};
  const int end = p.lists.entries(cta.query);
  typename Cta<kWidth>::Staged staged;
  cta.stage(0, end, staged);
  cta.load_heads();
  float d_q[Cta<kWidth>::kWarpTiles][2][4] = {};
  for (int first = 0; first < end; first += kTile) {
    __syncthreads();  // the tile before is done
    const bool any = cta.store(staged);
    cta.stage(first + kTile, end, staged);
    if (!__syncthreads_or(any)) continue;
    if (cta.warp < kWarps / 2)
      cta.template multiply<kWidth>(s.q, s.scores);
    else
      cta.template multiply<kValueDim>(s.d_out, s.d_probs);
    __syncthreads();
    cta.find_factors();
    __syncthreads();
    cta.add_to_d_q(d_q);
    cta.contribute(first);
  }
  cta.store_d_q(d_q);
}

}  // namespace mla::cuda::portable_backward_kernel
