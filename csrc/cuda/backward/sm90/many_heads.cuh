// The backward of sparse attention on Hopper: dQ, and a contribution to dKV for each (query, entry). A CTA has 64 heads
// and takes a query's tiles of 64 entries one by one:
//
//   S  [64 entries x 64 heads] = K Q^T over 576 dims (or 512)
//   dP [64 entries x 64 heads] = V dO^T over 512: in the same products, as Q and dO lie side by side
//   P = 2^(S - lse), dS = P (dP - delta)
//   dQ [64 heads x 576] += dS^T K
//   contributions [64 entries x 576] = dS Q, and P dO added in the first 512 dims, from registers
//
// Q, dO and one tile fill shared memory. The first warpgroup computes S, dP, P and dS, and the left 256 dims of dQ. The
// second one computes the other dims and most contributions. Four warps load the next tile meanwhile:
//
//   produce | load i + 1, left    | load i + 1, right       |
//   score   | S, dP of i ...| P, dS | dQ, left  | some contributions | S, dP of i + 1 ...
//   add     | contributions of i - 1 ... | dQ, right | contributions of i ...
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "cuda/backward/sm90/tile.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/wgmma.cuh"
#include "mla/backward.h"
#include "mla/number.h"

namespace mla::cuda::sm90::backward::many_heads {

constexpr int kHeads = 64;
static_assert(kMaxBackwardHeads <= 2 * kHeads);

// What becomes of contributions.
enum class Emit {
  rows,    // written: one CTA has all heads
  shared,  // two CTAs of a cluster have 64 heads each; the first one writes, the second one adds
  atomic,  // added to the accumulator at once
};

// Registers per thread after setmaxnreg; a launch begins with 168.
constexpr int kScorerRegisters = 224;
constexpr int kAdderRegisters = 240;
constexpr int kProducerRegisters = 40;
static_assert(kScorerRegisters + kAdderRegisters + kProducerRegisters <= 3 * 168);

// Blocks of 64 dims whose contributions the first warpgroup computes. The second one computes the others.
template <Emit kEmit>
constexpr int kScorerBlocks = kEmit == Emit::rows ? 3 : 4;

// Dims of contributions that a warpgroup computes at once. The second one has no registers for more.
constexpr int kScorerColumns = 64, kAdderColumns = 32;

constexpr int kSteps = kTileTokens / kStep;
static_assert(kTileTokens == kHeads);
constexpr int kQueryBytes = 2 * kBlockBytes;  // from a block of Q to the next block of Q; the same for dO

template <int kBlocks>
struct Shared {
  alignas(1024) uint8_t k[kBlocks][kBlockBytes];
  alignas(1024) uint8_t q[kBlocks + kLatentBlocks][kBlockBytes];  // blocks of Q and dO alternate, then Q's rope
  // P and dS, rows of entries. Once they have been read, the warpgroups stage their results there, each warp in its own
  // 16 rows: the first warpgroup in `probs`, the second one in `grads`.
  SwizzledRows<kTileTokens> probs, grads;
  int32_t row[2][kTileTokens];              // of kv, double-buffered by tile; negative: none
  float lse2[2][kHeads], delta[2][kHeads];  // double-buffered by query
  uint32_t stored[2][4];                    // tiles that each warp of the cluster's first CTA has written
  Barrier k_full[2], k_empty[2];            // the left 256 dims and the others
  Barrier q_full, q_empty;                  // and d_out
  Barrier factors_full, probs_read, grads_read, stage_empty;
};
static_assert(sizeof(Shared<9>) <= 227 * 1024);

// One of the grid's items of work: a query and 64 heads.
struct Item {
  int query, group, entries, tiles;

  __device__ Item(const BackwardProblem& p, int number) {
    const bool two = p.heads > kHeads;  // there are no more
    group = two ? number % 2 : 0;
    query = p.first + (two ? number / 2 : number);
    entries = p.lists.entries(query);
    tiles = tiles_of(entries);
  }
  static MLA_HOST_DEVICE int count(const BackwardProblem& p) { return p.count * head_groups(p.heads, kHeads); }
  __device__ int head_begin() const { return group * kHeads; }
};

// A lane's pairs of P and dS.
struct Factors {
  uint32_t probs[kSteps][4], grads[kSteps][4];

  // Products in flight read them: call this when they have ended, so that the registers stay as they are until then.
  __device__ void keep() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) hide(probs[step][i]), hide(grads[step][i]);
  }
};

template <int kBlocks, Emit kEmit>
struct Consumer {
  const BackwardProblem& p;
  Shared<kBlocks>& s;
  const int group, warp, lane;  // the warpgroup, and its warp

  // Whether this CTA adds its rows to those of the cluster's first CTA, where the same warp and lane wrote them.
  static __device__ bool adds() { return kEmit == Emit::shared && rank_in_cluster() == 1; }

  // The first CTA announces that it has written the rows of so many tiles ...
  __device__ void publish_rows(uint32_t tiles) {
    if (kEmit != Emit::shared || adds()) return;
    __syncwarp();
    if (lane == 0) store_in_cta(in_cta(cast_smem_ptr_to_uint(&s.stored[group][warp]), 1), tiles);
  }

  // ... and the second one waits for that.
  __device__ void wait_for_rows(uint32_t tiles) {
    while (load_released(cast_smem_ptr_to_uint(&s.stored[group][warp])) < tiles) {
    }
  }

  // The lane's address for ldmatrix and stmatrix of P: the warp's 16 entries, 16 heads of a step.
  __device__ uint32_t tiles_address(int step) const {
    const int row = warp * 16 + lane % 8 + lane / 8 % 2 * 8, piece = 2 * step + lane / 16;
    return s.probs.address(row, piece);
  }

  // Issues the products for the contributions of kColumns dims from `begin` on.
  template <int kColumns>
  __device__ void start_contribution(float (&acc)[kColumns / 2], const Factors& factors, int begin) {
    using Atom = std::conditional_t<kColumns == 32, gmma::MMA_64x32x16_F32BF16BF16_RS<Major::K, Major::MN>,
                                    gmma::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::MN>>;
    const bool latent = begin < kLatent;
    const uint64_t q = smem_descriptor_uniform(cast_smem_ptr_to_uint(s.q)) +
                       ((begin / kBlockDims * kQueryBytes + begin % kBlockDims * 2) >> 4);
    fence_acc(acc);
    cute::warpgroup_arrive();
    if (latent) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        wgmma<Atom>(acc, factors.probs[step], q + ((kBlockBytes + step * kStepBytes) >> 4), step > 0);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma<Atom>(acc, factors.grads[step], q + (step * kStepBytes >> 4), latent || step > 0);
    cute::warpgroup_commit_batch();
  }

  // Contributions of tile `n`, blocks kBegin to kEnd - 1. The warpgroup's dQ is in flight; `release` is called when it
  // is complete. From then on the stage is this warpgroup's.
  template <int kBegin, int kEnd, int kColumns, typename Release>
  __device__ void contribute(const Item& item, int tile, int n, Factors& factors, Release release) {
    const int lane = hidden(this->lane);
    float acc[kColumns / 2];
    start_contribution<kColumns>(acc, factors, kBegin * kBlockDims);
    publish_rows(n);
    cute::warpgroup_wait<1>();
    release();
#pragma unroll
    for (int begin = kBegin * kBlockDims; begin < kEnd * kBlockDims; begin += kColumns) {
      const auto start_next = [&] {
        if (begin + kColumns < kEnd * kBlockDims) start_contribution<kColumns>(acc, factors, begin + kColumns);
      };
      cute::warpgroup_wait<0>();
      fence_acc(acc);
      factors.keep();
      if constexpr (kEmit == Emit::atomic) {
        stage().template put<0>(acc, lane);
        if constexpr (kColumns == 64) {
          add(begin, n, lane);
          stage().template put<16>(acc, lane);
        }
        start_next();
        add(begin + kColumns - 32, n, lane);
      } else if constexpr (kEmit == Emit::rows) {
        uint32_t pairs[kColumns / 4];
        pack_acc(pairs, acc);
        start_next();
        write_pieces(pairs, begin, item, tile, n, lane);
      } else {
        stage().template put_pairs<kColumns>(acc, begin % kBlockDims, lane);
        start_next();
        if ((begin + kColumns) % kBlockDims > 0) continue;
        if (begin + kColumns == (kBegin + 1) * kBlockDims && adds()) wait_for_rows(n + 1);
        emit(begin / kBlockDims * kBlockDims, item, tile, n, lane);
      }
    }
  }

  // The row of kv of the entry that stage().take(i) returns; negative: none.
  __device__ int32_t number(int i, int n, int lane) const { return s.row[n % 2][warp * 16 + 4 * i + lane / 8]; }

  // Writes contributions from registers, which is faster than through the stage if a CTA has all heads.
  template <int kPairs>
  __device__ void write_pieces(const uint32_t (&pairs)[kPairs], int begin, const Item& item, int tile, int n,
                               int lane) {
    const int entry = warp * 16 + lane / 4;
    uint16_t* const row = p.contribution(0, item.query, tile * kTileTokens + entry) + begin + lane % 4 * kPieceNumbers;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool valid = s.row[n % 2][entry + 8 * half] >= 0;
#pragma unroll
      for (int i = half; i < kPairs; i += 8) {
        const uint4 piece = gather_piece(pairs[i], pairs[i + 2], pairs[i + 4], pairs[i + 6], lane);
        if (valid) store_streaming(row + 8 * half * kWidth<kBlocks> + i / 8 * 32, piece);
      }
    }
  }

  // Writes 64 staged columns of contributions, or adds them to those of the cluster's first CTA.
  __device__ void emit(int begin, const Item& item, int tile, int n, int lane) {
    uint16_t* const rows =
        p.contribution(0, item.query, tile * kTileTokens + warp * 16 + lane / 8) + begin + lane % 8 * kPieceNumbers;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 piece = stage().take(i, lane);
      if (number(i, n, lane) < 0) continue;
      uint16_t* const to = rows + 4 * i * kWidth<kBlocks>;
      adds() ? add_piece(to, piece) : store_cached(to, piece);
    }
  }

  // Adds 32 staged columns to the accumulator.
  __device__ void add(int begin, int n, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 piece = stage().take(i, lane);
      const int32_t row = number(i, n, lane);
      if (row >= 0) add_piece(p.accumulator + int64_t{row} * kWidth<kBlocks> + begin + lane % 8 * 4, piece);
    }
  }

  // Writes a query's dQ, blocks from kBegin on.
  template <int kBegin, int kAccRegisters>
  __device__ void write(const Item& item, const float (&acc)[kAccRegisters]) {
    const int lane = hidden(this->lane);
    const int head = item.head_begin() + warp * 16 + lane / 8;
    write_blocks<kBegin, 0>(p.d_q.at(item.query, head) + lane % 8 * kPieceNumbers, head, acc, lane);
  }

  // The dQ of a query with nothing to attend to.
  __device__ void write_zeros(const Item& item) {
    constexpr int kPieces = kWidth<kBlocks> / kPieceNumbers;
#pragma unroll 1
    for (int i = warp * 32 + hidden(lane); i < kHeads * kPieces; i += kGroupThreads) {
      const int head = item.head_begin() + i / kPieces;
      if (head < p.heads) store_streaming(p.d_q.at(item.query, head) + i % kPieces * kPieceNumbers, uint4{});
    }
  }

  __device__ Lines stage() const { return {s.probs.address() + group * kBlockBytes + warp * 16 * kRowBytes}; }

 private:
  template <int kBegin, int kBlock, int kAccRegisters>
  __device__ void write_blocks(uint16_t* rows, int head, const float (&acc)[kAccRegisters], int lane) {
    if constexpr (32 * kBlock < kAccRegisters) {
      const Lines lines = stage();
      lines.template put_pairs<64, 32 * kBlock>(acc, 0, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 piece = lines.take(i, lane);
        if (head + 4 * i < p.heads) store_streaming(rows + 4 * i * p.d_q.head + (kBegin + kBlock) * kBlockDims, piece);
      }
      write_blocks<kBegin, kBlock + 1>(rows, head, acc, lane);
    }
  }
};

template <int kCount>
__device__ void clear(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = 0.0f;
}

// S, dP, P and dS; the left 256 dims of dQ; some contributions.
template <int kBlocks, Emit kEmit>
struct Scorer : Consumer<kBlocks, kEmit> {
  using Base = Consumer<kBlocks, kEmit>;
  using Base::lane, Base::p, Base::s, Base::warp;
  using BothAtom = gmma::MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K>;
  using RopeAtom = Bf16Atom<64, Major::K, Major::K>;
  using QueryAtom = gmma::MMA_64x256x16_F32BF16BF16_SS<Major::MN, Major::MN>;

  float d_q[128];

  __device__ void load_statistics(const Item& item, int parity) {
    const int number = warp * 32 + lane, head = item.head_begin() + number;
    if (number < kHeads) {
      const bool exists = head < p.heads;
      const int64_t at = int64_t{item.query} * p.heads + head;
      s.lse2[parity][number] = exists ? p.lse2[at] : INFINITY;
      s.delta[parity][number] = exists ? p.delta[at] : 0.0f;
    }
    sync_named<kGroupThreads>(1);
  }

  // acc += blocks [begin, end) of the tile times those of Q and dO: S in the first 32 registers, then dP.
  __device__ void multiply_rows(float (&acc)[64], int begin, int end) {
    const uint64_t k = smem_descriptor_uniform(cast_smem_ptr_to_uint(s.k)),
                   q = smem_descriptor_uniform(cast_smem_ptr_to_uint(s.q));
    fence_acc(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int block = begin; block < end; ++block)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t a = k + ((block * kBlockBytes + step * kStep * 2) >> 4),
                       b = q + ((block * kQueryBytes + step * kStep * 2) >> 4);
        if (block < kLatentBlocks)
          wgmma<BothAtom>(acc, a, b, block > 0 || step > 0);
        else
          wgmma<RopeAtom>(acc, a, b);
      }
  }

  __device__ void run() {
    int n = 0, queries = 0;
    for (int number = blockIdx.x; number < Item::count(p); number += gridDim.x) {
      const Item item(p, number);
      if (item.tiles == 0) {
        this->write_zeros(item);
        continue;
      }
      load_statistics(item, queries % 2);
      clear(d_q);
      wait(s.q_full, queries % 2);
      for (int tile = 0; tile < item.tiles; ++tile, ++n) {
        Factors factors;
        {
          float acc[64];
          wait(s.k_full[0], n % 2);
          fence_async_shared();
          multiply_rows(acc, 0, kHalfBlocks);
          wait(s.k_full[1], n % 2);
          fence_async_shared();
          multiply_rows(acc, kHalfBlocks, kBlocks);
          cute::warpgroup_commit_batch();
          cute::warpgroup_wait<0>();
          fence_acc(acc);
          find_factors(factors, acc, n % 2, queries % 2);
        }
        wait(s.stage_empty, n % 2 ^ 1);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          store_tiles(this->tiles_address(step), factors.probs[step]);
          store_tiles(this->tiles_address(step) + kBlockBytes, factors.grads[step]);
        }
        fence_async_shared();
        arrive_as_warp(s.factors_full);

        const uint64_t values = smem_descriptor_uniform(cast_smem_ptr_to_uint(s.k), kBlockBytes),
                       grads = smem_descriptor_uniform(s.grads.address());
        wait(s.factors_full, n % 2);  // of the other warps
        fence_acc(d_q);
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          wgmma<QueryAtom>(d_q, grads + (step * kStepBytes >> 4), values + (step * kStepBytes >> 4));
        cute::warpgroup_commit_batch();
        this->template contribute<0, kScorerBlocks<kEmit>, kScorerColumns>(item, tile, n, factors, [&] {
          fence_acc(d_q);
          arrive_as_warp(s.k_empty[0]);
          arrive_as_warp(s.grads_read);
          wait(s.probs_read, n % 2);
        });
      }
      arrive_as_warp(s.q_empty);
      ++queries;
      this->template write<0>(item, d_q);
    }
    if (n > 0) this->publish_rows(n);
  }

  // Computes P and dS from S and dP. Both are zero for invalid entries.
  __device__ void find_factors(Factors& factors, float (&acc)[64], int parity, int query_parity) {
    const float scale2 = p.scale * kLog2E;
    const int32_t* const rows = s.row[parity] + warp * 16 + lane / 4;
    const bool valid[2] = {rows[0] >= 0, rows[8] >= 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 lse2 = reinterpret_cast<const float2*>(s.lse2[query_parity])[4 * j + lane % 4],
                   delta = reinterpret_cast<const float2*>(s.delta[query_parity])[4 * j + lane % 4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float prob[2], grad[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * j + 2 * half + e;
          prob[e] = exp2_approximate(fmaf(acc[i], scale2, -(e ? lse2.y : lse2.x)));
          if (!valid[half]) prob[e] = 0.0f;
          grad[e] = prob[e] * p.scale * (acc[32 + i] - (e ? delta.y : delta.x));
        }
        factors.probs[j / 2][j % 2 * 2 + half] = pack_bf16(prob[0], prob[1]);
        factors.grads[j / 2][j % 2 * 2 + half] = pack_bf16(grad[0], grad[1]);
      }
    }
  }
};

// The right dims of dQ, and most contributions.
template <int kBlocks, Emit kEmit>
struct Adder : Consumer<kBlocks, kEmit> {
  using Base = Consumer<kBlocks, kEmit>;
  using Base::lane, Base::p, Base::s, Base::warp;
  using LeftAtom = gmma::MMA_64x256x16_F32BF16BF16_SS<Major::MN, Major::MN>;
  using RightAtom = Bf16Atom<64, Major::MN, Major::MN>;

  float d_q[(kBlocks - kHalfBlocks) * 32];

  __device__ void run() {
    int n = 0;
    for (int number = blockIdx.x; number < Item::count(p); number += gridDim.x) {
      const Item item(p, number);
      clear(d_q);
      for (int tile = 0; tile < item.tiles; ++tile, ++n) {
        wait(s.factors_full, n % 2);
        fence_async_shared();
        const uint64_t values = smem_descriptor_uniform(cast_smem_ptr_to_uint(s.k[kHalfBlocks]), kBlockBytes),
                       grads = smem_descriptor_uniform(s.grads.address());
        fence_acc(d_q);
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const uint64_t a = grads + (step * kStepBytes >> 4), b = values + (step * kStepBytes >> 4);
          wgmma<LeftAtom>(d_q, a, b);
          if constexpr (kBlocks > kLatentBlocks) wgmma<RightAtom, 128>(d_q, a, b + (kHalfBytes >> 4));
        }
        cute::warpgroup_commit_batch();
        Factors factors;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          load_tiles(factors.probs[step], this->tiles_address(step));
          load_tiles(factors.grads[step], this->tiles_address(step) + kBlockBytes);
        }
        arrive_as_warp(s.probs_read);
        this->template contribute<kScorerBlocks<kEmit>, kBlocks, kAdderColumns>(item, tile, n, factors, [&] {
          fence_acc(d_q);
          arrive_as_warp(s.k_empty[1]);
          arrive_as_warp(s.grads_read);  // this warp's product has read dS of all warps
          wait(s.grads_read, n % 2);
        });
        if (tile + 1 < item.tiles) arrive_as_warp(s.stage_empty);
      }
      if (item.tiles == 0) continue;
      arrive_as_warp(s.q_empty);
      this->template write<kHalfBlocks>(item, d_q);
      arrive_as_warp(s.stage_empty);
    }
    if (n > 0) this->publish_rows(n);
  }
};

// Copies a producer warp's rows of a query's Q and dO; zeros beyond its heads.
template <int kBlocks>
__device__ __forceinline__ void copy_queries(const BackwardProblem& p, Shared<kBlocks>& s, const Item& item, int first,
                                             int lane) {
  const int head = first + lane % kWarpRows;
  const auto own = [&](int64_t head_stride) {
    return item.head_begin() + head < p.heads ? head * static_cast<uint32_t>(head_stride / kPieceNumbers) : kNoRow;
  };
  const uint32_t q = cast_smem_ptr_to_uint(s.q), d_out = q + kBlockBytes;
  const uint16_t* q_rows = p.q.at(item.query, item.head_begin());
  copy_rows<kWarpRows, kBlocks, 0, kQueryBytes>(q, first, q_rows, own(p.q.head), lane);
  copy_rows<kWarpRows, kBlocks, 1, kQueryBytes>(q, first, q_rows, own(p.q.head), hidden(lane));
  const uint16_t* d_out_rows = p.d_out.at(item.query, item.head_begin());
  copy_rows<kWarpRows, kLatentBlocks, 0, kQueryBytes>(d_out, first, d_out_rows, own(p.d_out.head), hidden(lane));
  copy_rows<kWarpRows, kLatentBlocks, 1, kQueryBytes>(d_out, first, d_out_rows, own(p.d_out.head), hidden(lane));
}

// A producer warp: its rows of each tile, and of a query's Q and dO once its first tile is in flight.
template <int kBlocks>
__device__ void produce(const BackwardProblem& p, Shared<kBlocks>& s, int warp, int lane) {
  int n = 0, queries = 0;
  const int first = warp * kWarpRows;
  for (int number = blockIdx.x; number < Item::count(p); number += gridDim.x) {
    const Item item(p, number);
    const int own = first + lane % kWarpRows;
    const int32_t* list = p.lists.indices + item.query * p.lists.stride;
    const auto load = [&](int entry) { return entry < item.entries ? list[entry] : -1; };
    int next = load(own);
    for (int tile = 0; tile < item.tiles; ++tile, ++n) {
      const bool valid = p.lists.names(next);
      const uint32_t row = valid ? next * static_cast<uint32_t>(p.kv_row / kPieceNumbers) : kNoRow;
      const int32_t listed = valid ? next : -1;
      next = load((tile + 1) * kTileTokens + own);
      const uint32_t k = cast_smem_ptr_to_uint(s.k);
      wait(s.k_empty[0], n % 2 ^ 1);
      if (lane < kWarpRows) s.row[n % 2][own] = listed;
      copy_rows<kWarpRows, kBlocks, 0>(k, first, p.kv, row, hidden(lane));
      arrive_when_copied(s.k_full[0]);
      arrive_as_warp(s.k_full[0]);
      wait(s.k_empty[1], n % 2 ^ 1);
      copy_rows<kWarpRows, kBlocks, 1>(k, first, p.kv, row, hidden(lane));
      arrive_when_copied(s.k_full[1]);
      arrive_as_warp(s.k_full[1]);
      if (tile > 0) continue;
      wait(s.q_empty, queries++ % 2 ^ 1);
      copy_queries(p, s, item, first, hidden(lane));
      arrive_when_copied(s.q_full);
      arrive_as_warp(s.q_full);
    }
  }
}

template <int kBlocks, Emit kEmit>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ BackwardProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kBlocks>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) s.k_full[i].init(kArrivals), s.k_empty[i].init(4 * kWarpArrivals);
    s.q_full.init(kArrivals), s.q_empty.init(8 * kWarpArrivals);
    s.factors_full.init(4 * kWarpArrivals), s.stage_empty.init(4 * kWarpArrivals);
    s.probs_read.init(4 * kWarpArrivals), s.grads_read.init(8 * kWarpArrivals);
    for (int i = 0; i < 8; ++i) s.stored[i / 4][i % 4] = 0;
  }
  kEmit == Emit::shared ? cute::cluster_sync() : __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  const int warp = warp_of_cta(), lane = threadIdx.x % 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_alloc<kScorerRegisters>();
    Scorer<kBlocks, kEmit>{{p, s, 0, warp, hidden(lane)}}.run();
  } else if (warp < 8) {
    cutlass::arch::warpgroup_reg_alloc<kAdderRegisters>();
    Adder<kBlocks, kEmit>{{p, s, 1, warp - 4, hidden(lane)}}.run();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    produce<kBlocks>(p, s, warp - 8, hidden(lane));
  }
}

}  // namespace mla::cuda::sm90::backward::many_heads
