// The backward of sparse attention for up to 32 heads on Hopper. Operands are swapped: entries are the 64 rows of wgmma
// and heads its columns, so that few heads fill the instruction. A CTA takes a query's tiles of 64 entries:
//
//   S^T | dP^T [64 entries x 2 heads] = K [64 x 512] (Q | dO)^T, and S^T += K Q^T of the 64 dims of rope
//   P = 2^(S - lse), dS = P (dP - delta)
//   dQ^T [576 dims x heads] += K^T dS^T
//   contributions [64 entries x 576] = (dS^T | P^T) [64 x 2 heads] (Q | dO)
//
// In each block of 64 dims dO lies below Q, so that one product adds both parts of a contribution. Its operand A stays
// in the registers in which it was computed. For up to 16 heads there is a second copy of Q and dO for contributions,
// with dims in such an order that a lane's accumulators are neighbours.
//
// Two consumer warpgroups take every other tile each, with a dQ of their own. At a query's end the one with the last
// tile stores its dQ in that tile's memory. The other one adds its own and writes the sum. Stores of contributions take
// longest, so everything else overlaps with one warpgroup's stores.
//
//   produce | load i + 2 ...           | load i + 3 ...
//   group 0 | S, dP, P, dS | contributions of i, dQ first ... | S, dP, P, dS of i + 2 ...
//   group 1 | contributions of i - 1 ...     | S, dP, P, dS | contributions of i + 1 ...
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <type_traits>

#include "cuda/backward/sm90/tile.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/wgmma.cuh"
#include "mla/backward.h"
#include "mla/number.h"

// Wgmmas of 24 and 48 columns. It needs what comes before.
#include <cute/arch/mma_sm90_gmma_ext.hpp>

namespace mla::cuda::sm90::backward::few_heads {

// Registers per thread after setmaxnreg; a launch begins with 168.
template <int kHeads>
constexpr uint32_t kConsumerRegisters = kHeads <= 16   ? 208
                                        : kHeads <= 24 ? 224
                                                       : 232;
template <int kHeads>
constexpr uint32_t kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters<kHeads>;

constexpr int kBlockSteps = kBlockDims / kStep, kTileSteps = kTileTokens / kStep;

template <int kHeads>
constexpr int kHeadBytes = 2 * kHeads * kRowBytes;  // a block of Q and dO
// Rows of the last block, which is Q's rope: padded with zeros to a multiple of k.
template <int kHeads>
constexpr int kRopeRows = (kHeads + kStep - 1) / kStep * kStep;

template <int kColumns, Major kA, Major kB>
using HeadsAtom = std::conditional_t<
    kColumns == 24, gmma::MMA_64x24x16_F32BF16BF16_SS<kA, kB>,
    std::conditional_t<kColumns == 48, gmma::MMA_64x48x16_F32BF16BF16_SS<kA, kB>, Bf16Atom<kColumns, kA, kB>>>;

// Whether there is room for a second copy of Q and dO, "turned": each 64 bytes are transposed as 4 x 4 words of 4
// bytes. Then a lane's four pairs of a row, of columns 8 apart, are 8 neighbouring dims.
template <int kHeads>
constexpr bool kTurns = kHeads <= 16;

template <int kHeads, int kBlocks>
struct Shared {
  static constexpr int kQueries = kHeads <= 8 ? 2 : 1;  // buffers for a query
  static constexpr int kTurned = kTurns<kHeads> ? kQueries : 0;
  static constexpr int kQueryBytes =
      kLatentBlocks * kHeadBytes<kHeads> + (kBlocks - kLatentBlocks) * kRopeRows<kHeads> * kRowBytes;

  alignas(1024) uint8_t k[2][kBlocks][kBlockBytes];              // a warpgroup's tile, and at a query's end its dQ
  alignas(1024) uint8_t heads[kQueries + kTurned][kQueryBytes];  // Q and dO; then turned copies
  SwizzledRows<kHeads> grads[2];                                 // a warpgroup's dS, in rows of heads
  alignas(16) float lse2[kQueries][kHeads], delta[kQueries][kHeads];
  uint8_t valid[2][kTileTokens];
  Barrier k_full[2], k_empty[2];
  Barrier q_full[kQueries + kTurned], q_empty[kQueries + kTurned];
  Barrier d_q_full[kQueries];  // of the warpgroup that had a query's last tile
};
static_assert(sizeof(Shared<8, 9>) <= 227 * 1024 && sizeof(Shared<16, 9>) <= 227 * 1024 &&
              sizeof(Shared<24, 9>) <= 227 * 1024 && sizeof(Shared<32, 9>) <= 227 * 1024);

// Where a lane's contributions go: to rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <int kHeads, int kBlocks>
struct LaneRowsOf {
  uint16_t* row;  // this lane's first piece of 16 bytes
  bool valid[2];

  // Writes 64 columns of one of the rows. All lanes of a warp call it.
  __device__ void store(const uint32_t (&pairs)[16], int half, int block, int lane) const {
#pragma unroll
    for (int i = half; i < 16; i += 8) {
      const uint4 piece = kTurns<kHeads> ? uint4{pairs[i], pairs[i + 2], pairs[i + 4], pairs[i + 6]}
                                         : gather_piece(pairs[i], pairs[i + 2], pairs[i + 4], pairs[i + 6], lane);
      if (valid[half])
        store_streaming(row + half * 8 * kWidth<kBlocks> + block * kBlockDims + i / 8 * (kBlockDims / 2), piece);
    }
  }
};

template <int kHeads, int kBlocks>
struct Consumer {
  using Memory = Shared<kHeads, kBlocks>;
  static constexpr int kAccRegisters = kHeads / 2;  // a lane's numbers of 64 rows
  static constexpr int kSteps = kHeads / 8;         // of a contribution, with k = 2 * kHeads
  static constexpr int kPartBlocks = 3, kParts = (kBlocks + kPartBlocks - 1) / kPartBlocks;  // of dQ

  const BackwardProblem& p;
  Memory& s;
  const int group, warp, lane;  // warp of the warpgroup

  float d_q[kBlocks][kAccRegisters];

  __device__ void run() {
    // Queries with tiles so far, and tiles so far of both warpgroups.
    uint32_t queries = 0, before = 0;
    clear_d_q();
    for (int query = p.first + blockIdx.x; query < p.first + p.count; query += gridDim.x) {
      const int tiles = tiles_of(p.lists.entries(query));
      const uint32_t slot = queries % Memory::kQueries, parity = queries / Memory::kQueries % 2;
      const int first = (before ^ group) & 1;  // this warpgroup's first tile
      if (tiles > 0) wait(s.q_full[slot], parity);
      if (kTurns<kHeads> && tiles > 0 && first >= tiles) {  // without a tile, still keep in step with the barriers
        arrive_as_warp(s.q_empty[slot]);
        wait(s.q_full[slot + Memory::kTurned], parity);
      }
      for (int tile = first; tile < tiles; tile += 2)
        take_tile(query, tile, tiles, slot, (before + tile) / 2 % 2, parity);
      before += tiles;
      if (tiles > 0) arrive_as_warp(s.q_empty[slot + Memory::kTurned]);
      if (before % 2 == group) {
        if (tiles > 0) add_other_d_q(slot, parity);
        write_d_q(query);
        clear_d_q();
      }
      if (tiles > 0) ++queries;
    }
  }

  __device__ void take_tile(int query, int tile, int tiles, uint32_t slot, uint32_t parity, uint32_t query_parity) {
    const uint64_t k = smem_descriptor_uniform(cast_smem_ptr_to_uint(s.k[group])),
                   grads = smem_descriptor_uniform(s.grads[group].address()),
                   heads = smem_descriptor_uniform(cast_smem_ptr_to_uint(s.heads[slot + Memory::kTurned]));
    uint32_t factors[kSteps][4];  // dS, then P
    wait(s.k_full[group], parity);
    fence_async_shared();
    find_factors(factors, k, slot);
    if constexpr (kTurns<kHeads>) {
      if (tile + 2 >= tiles) arrive_as_warp(s.q_empty[slot]);
      wait(s.q_full[slot + Memory::kTurned], query_parity);
    }
    sync_group();  // all warps have read the last tile's dS
    store_grads(factors);
    fence_async_shared();
    sync_group();

    const LaneRowsOf<kHeads, kBlocks> rows = rows_of(query, tile);
    float acc[32];
    uint32_t pairs[16];
    start_contribution(acc, factors, heads, 0);
    start_d_q(k, grads, 0);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block < kParts)
        cute::warpgroup_wait<1>();
      else
        cute::warpgroup_wait<0>();
      fence_acc(acc);
      pack_acc(pairs, acc);
      if (block == kParts) release(tile + 1 == tiles, slot);
      rows.store(pairs, 0, block, lane);
      if (block + 1 < kBlocks) start_contribution(acc, factors, heads, block + 1);
      if (block + 1 < kParts) start_d_q(k, grads, block + 1);
      rows.store(pairs, 1, block, lane);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      for (uint32_t& pair : factors[step]) hide(pair);  // the products read them until now
  }

  __device__ void sync_group() { sync_named<kGroupThreads>(1 + group); }

  __device__ void find_factors(uint32_t (&factors)[kSteps][4], uint64_t k, uint32_t slot) {
    const uint64_t heads = smem_descriptor_uniform(cast_smem_ptr_to_uint(s.heads[slot]));
    float acc[2 * kAccRegisters];  // S, then dP
    fence_acc(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int step = 0; step < kBlockSteps; ++step) {
        const uint64_t a = k + ((block * kBlockBytes + step * kStep * 2) >> 4),
                       b = heads + ((block * kHeadBytes<kHeads> + step * kStep * 2) >> 4);
        if (block < kLatentBlocks)
          wgmma<HeadsAtom<2 * kHeads, Major::K, Major::K>>(acc, a, b, block > 0 || step > 0);
        else
          wgmma<HeadsAtom<kHeads, Major::K, Major::K>>(acc, a, b);
      }
    cute::warpgroup_commit_batch();
    const float scale2 = p.scale * kLog2E;
    const int row = warp * 16 + lane / 4;
    const bool valid[2] = {s.valid[group][row] != 0, s.valid[group][row + 8] != 0};
    cute::warpgroup_wait<0>();
    fence_acc(acc);
#pragma unroll
    for (int i = 0; i < kAccRegisters; i += 2) {  // of neighbouring heads
      const int head = i / 4 * 8 + lane % 4 * 2;
      const auto lse2 = *reinterpret_cast<const float2*>(&s.lse2[slot][head]),
                 delta = *reinterpret_cast<const float2*>(&s.delta[slot][head]);
      const auto prob_of = [&](float score, float lse2) {
        return valid[i / 2 % 2] ? exp2_approximate(fmaf(score, scale2, -lse2)) : 0.0f;
      };
      const float first = prob_of(acc[i], lse2.x), second = prob_of(acc[i + 1], lse2.y);
      factors[i / 8][i / 2 % 4] = pack_bf16(first * p.scale * (acc[kAccRegisters + i] - delta.x),
                                            second * p.scale * (acc[kAccRegisters + i + 1] - delta.y));
      factors[(kAccRegisters + i) / 8][(kAccRegisters + i) / 2 % 4] = pack_bf16(first, second);
    }
  }

  // Stores dS as rows of heads; a warp stores 16 entries of each.
  __device__ void store_grads(const uint32_t (&factors)[kSteps][4]) {
    const int head = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    const uint32_t to = s.grads[group].address() + head * kRowBytes + offset_in_row(lane % 8, piece);
#pragma unroll
    for (int step = 0; step < kHeads / 16; ++step) store_tiles_transposed(to + step * kStepBytes, factors[step]);
    if constexpr (kHeads % 16 > 0) {
      const uint32_t last[2] = {factors[kHeads / 16][0], factors[kHeads / 16][1]};
      store_tiles_transposed(to + kHeads / 16 * kStepBytes, last);
    }
  }

  // Issues the products for 64 dims of contributions.
  __device__ void start_contribution(float (&acc)[32], const uint32_t (&factors)[kSteps][4], uint64_t heads,
                                     int block) {
    const int steps = block < kLatentBlocks ? kSteps : kRopeRows<kHeads> / kStep;
    fence_acc(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      if (step < steps)
        wgmma<gmma::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::MN>>(
            acc, factors[step], heads + ((block * kHeadBytes<kHeads> + step * kStepBytes) >> 4), step > 0);
    cute::warpgroup_commit_batch();
  }

  // Issues the products for kPartBlocks blocks of dQ.
  __device__ void start_d_q(uint64_t k, uint64_t grads, int part) {
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step)
#pragma unroll
      for (int block = part * kPartBlocks; block < (part + 1) * kPartBlocks; ++block)
        if (block < kBlocks)
          wgmma<HeadsAtom<kHeads, Major::MN, Major::K>>(
              d_q[block], k + ((block * kBlockBytes + step * kStepBytes) >> 4), grads + ((step * kStep * 2) >> 4));
    cute::warpgroup_commit_batch();
  }

  __device__ LaneRowsOf<kHeads, kBlocks> rows_of(int query, int tile) const {
    const int lane = hidden(this->lane), row = warp * 16 + lane / 4;
    return {p.contribution(0, query, tile * kTileTokens) + row * kWidth<kBlocks> + lane % 4 * kPieceNumbers,
            {s.valid[group][row] != 0, s.valid[group][row + 8] != 0}};
  }

  // Called when the tile has been read and dQ is complete: releases the tile, or stores dQ there after the last one.
  __device__ void release(bool last, uint32_t slot) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) fence_acc(d_q[block]);
    if (!last) return arrive_as_warp(s.k_empty[group]);
    sync_group();
    auto* to = reinterpret_cast<float4*>(s.k[group]) + threadIdx.x % kGroupThreads;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < kAccRegisters; i += 4, to += kGroupThreads)
        *to = {d_q[block][i], d_q[block][i + 1], d_q[block][i + 2], d_q[block][i + 3]};
    arrive_as_warp(s.d_q_full[slot]);
    clear_d_q();
  }

  // The sum is the same whichever warpgroup had the last tile.
  __device__ void add_other_d_q(uint32_t slot, uint32_t parity) {
    wait(s.d_q_full[slot], parity);
    const auto* from = reinterpret_cast<const float4*>(s.k[1 - group]) + threadIdx.x % kGroupThreads;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < kAccRegisters; i += 4, from += kGroupThreads) {
        const float4 other = *from;
        d_q[block][i] += other.x, d_q[block][i + 1] += other.y;
        d_q[block][i + 2] += other.z, d_q[block][i + 3] += other.w;
      }
    arrive_as_warp(s.k_empty[1 - group]);
  }

  // After transposing, a lane has two pairs of a head's 16 dims. An exchange makes them four neighbours.
  __device__ void write_d_q(int query) const {
    const int lane = hidden(this->lane);
    const bool odd = lane & 1;
    uint16_t* const to = p.d_q.data + query * p.d_q.token + warp * 16 + (odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
      const int head = 8 * j + lane / 4;
      uint16_t* const row = to + head * p.d_q.head;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float (&acc)[kAccRegisters] = d_q[block];
        const uint32_t left = transpose_tile(pack_bf16(acc[4 * j], acc[4 * j + 1])),
                       right = transpose_tile(pack_bf16(acc[4 * j + 2], acc[4 * j + 3]));
        const uint32_t other = __shfl_xor_sync(~0u, odd ? left : right, 1);
        if (head < p.heads)
          *reinterpret_cast<uint2*>(row + block * kBlockDims) = odd ? uint2{other, right} : uint2{left, other};
      }
    }
  }

  __device__ void clear_d_q() {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < kAccRegisters; ++i) d_q[block][i] = 0.0f;
  }
};

// Copies half of a query's Q or dO; zeros beyond its heads.
template <int kHeads, int kBlocks, int kHalf>
__device__ __forceinline__ void copy_half(uint32_t to, const uint16_t* rows, int64_t stride, int heads, int lane) {
#pragma unroll
  for (int first = 0; first < kHeads; first += 8) {
    lane = hidden(lane);
    const int head = first + lane % 8;
    const uint32_t own = head < heads ? head * static_cast<uint32_t>(stride / kPieceNumbers) : kNoRow;
    copy_rows<8, kBlocks, kHalf, kHeadBytes<kHeads>>(to, first, rows, own, lane);
  }
}

template <int kHeads>
__device__ __forceinline__ void copy_statistics(float (&to)[kHeads], const float* from, int query, int heads,
                                                int lane) {
  if (lane < kHeads)
    copy_4_or_zero(cast_smem_ptr_to_uint(to + lane), from + (lane < heads ? int64_t{query} * heads + lane : 0),
                   lane < heads);
}

// Copies a query's Q and dO, lse2 and delta: half of Q or dO per producer warp.
template <int kHeads, int kBlocks>
__device__ __forceinline__ void copy_query(const BackwardProblem& p, Shared<kHeads, kBlocks>& s, int query, int slot,
                                           int warp, int lane) {
  const uint32_t q = cast_smem_ptr_to_uint(s.heads[slot]), d_out = q + kHeads * kRowBytes;
  if (warp == 0) {
    copy_half<kHeads, kBlocks, 0>(q, p.q.at(query), p.q.head, p.heads, lane);
    copy_statistics(s.lse2[slot], p.lse2, query, p.heads, lane);
  } else if (warp == 1) {
    copy_half<kHeads, kBlocks, 1>(q, p.q.at(query), p.q.head, p.heads, lane);
    copy_statistics(s.delta[slot], p.delta, query, p.heads, lane);
  } else if (warp == 2) {
    copy_half<kHeads, kLatentBlocks, 0>(d_out, p.d_out.at(query), p.d_out.head, p.heads, lane);
  } else {
    copy_half<kHeads, kLatentBlocks, 1>(d_out, p.d_out.at(query), p.d_out.head, p.heads, lane);
  }
}

// The turned copy, word by word: every fourth row per producer warp.
template <int kHeads, int kBlocks>
__device__ __forceinline__ void copy_query_turned(const BackwardProblem& p, Shared<kHeads, kBlocks>& s, int query,
                                                  int slot, int warp, int lane) {
  const uint32_t to = cast_smem_ptr_to_uint(s.heads[slot]) + lane % 16 / 4 * 4;
  const int piece = lane / 16 * 4 + lane % 4;
#pragma unroll 1
  for (int row = warp; row < 2 * kHeads; row += kProducerWarps) {
    const bool of_d_out = row >= kHeads;
    const int head = of_d_out ? row - kHeads : row;
    const bool exists = head < p.heads;
    const uint16_t* from = of_d_out ? p.d_out.data + query * p.d_out.token : p.q.data + query * p.q.token;
    if (exists) from += head * (of_d_out ? p.d_out.head : p.q.head);
    const uint32_t row_to = swizzled(to, row, piece);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      if (block < kLatentBlocks || !of_d_out)
        copy_4_or_zero(row_to + block * kHeadBytes<kHeads>, from + block * kBlockDims + lane * 2, exists);
  }
}

// A producer warp: its rows of each tile, and its share of each query's Q and dO.
template <int kHeads, int kBlocks>
__device__ void produce(const BackwardProblem& p, Shared<kHeads, kBlocks>& s, int warp, int lane) {
  using Memory = Shared<kHeads, kBlocks>;
  uint32_t n = 0, queries = 0;
  const int first = warp * kWarpRows, own = first + lane % kWarpRows;
  for (int number = blockIdx.x; number < p.count; number += gridDim.x) {
    const int query = p.first + number, entries = p.lists.entries(query), tiles = tiles_of(entries);
    const int32_t* list = p.lists.indices + query * p.lists.stride;
    const auto load = [&](int entry) { return entry < entries ? list[entry] : -1; };
    int next = load(own);
    for (int tile = 0; tile < tiles; ++tile, ++n) {
      const uint32_t row = p.lists.names(next) ? next * static_cast<uint32_t>(p.kv_row / kPieceNumbers) : kNoRow;
      next = load((tile + 1) * kTileTokens + own);
      const uint32_t stage = n % 2, k = cast_smem_ptr_to_uint(s.k[stage]);
      wait(s.k_empty[stage], n / 2 % 2 ^ 1);
      if (lane < kWarpRows) s.valid[stage][own] = row != kNoRow;
      copy_rows<kWarpRows, kBlocks, 0>(k, first, p.kv, row, hidden(lane));
      copy_rows<kWarpRows, kBlocks, 1>(k, first, p.kv, row, hidden(lane));
      arrive_when_copied(s.k_full[stage]);
      arrive_as_warp(s.k_full[stage]);
      // The operand of contributions is freed last, so it is loaded later, after the query's second tile.
      const uint32_t slot = queries % Memory::kQueries, parity = queries / Memory::kQueries % 2 ^ 1;
      if (kTurns<kHeads> && tile == 0) {
        wait(s.q_empty[slot], parity);
        copy_query(p, s, query, slot, warp, hidden(lane));
        arrive_when_copied(s.q_full[slot]);
        arrive_as_warp(s.q_full[slot]);
      }
      if (tile == min(1, tiles - 1)) {
        Barrier &full = s.q_full[slot + Memory::kTurned], &empty = s.q_empty[slot + Memory::kTurned];
        wait(empty, parity);
        if constexpr (kTurns<kHeads>)
          copy_query_turned(p, s, query, slot + Memory::kTurned, warp, hidden(lane));
        else
          copy_query(p, s, query, slot, warp, hidden(lane));
        arrive_when_copied(full);
        arrive_as_warp(full);
        ++queries;
      }
    }
  }
}

template <int kHeads, int kBlocks>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ BackwardProblem p) {
  using Memory = Shared<kHeads, kBlocks>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Memory*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) s.k_full[i].init(kArrivals), s.k_empty[i].init(4 * kWarpArrivals);
    for (int i = 0; i < Memory::kQueries; ++i) s.d_q_full[i].init(4 * kWarpArrivals);
    for (int i = 0; i < Memory::kQueries + Memory::kTurned; ++i)
      s.q_full[i].init(kArrivals), s.q_empty[i].init(8 * kWarpArrivals);
  }
  if constexpr (kBlocks > kLatentBlocks && kRopeRows<kHeads> > kHeads) {
    constexpr int kPieces = (kRopeRows<kHeads> - kHeads) * kRowPieces;
    const int slot = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    if (slot < Memory::kQueries + Memory::kTurned)
      reinterpret_cast<uint4*>(s.heads[slot] + kLatentBlocks * kHeadBytes<kHeads> + kHeads * kRowBytes)[piece] = {};
    fence_async_shared();
  }
  __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  const int warp = warp_of_cta(), lane = threadIdx.x % 32;
  if (warp < 8) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters<kHeads>>();
    Consumer<kHeads, kBlocks>{p, s, warp / 4, warp % 4, lane}.run();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters<kHeads>>();
    produce(p, s, warp - 8, lane);
  }
}

}  // namespace mla::cuda::sm90::backward::few_heads
