// The backward of sparse attention on Hopper: dQ, and a contribution to dKV for each (query,
// entry). A block has 64 heads, the rows of wgmma, and takes a query's tiles of 64 entries one by one:
//
//   S  [64 heads x 64 entries] = Q [64 x 576] K^T      (or 512)
//   dP [64 heads x 64 entries] = dO [64 x 512] V^T
//   P = 2^(S - lse), dS = P (dP - delta)
//   dQ [64 heads x 576] += dS K
//   contributions [64 entries x 576] = dS^T Q, and P^T dO added in the first 512 dims
//
// Q, dO and one tile fill shared memory. The first warpgroup computes S, dP, P and dS, and sums up the left 256 dims of
// dQ; the second sums up the others and computes most contributions, while four warps load the next tile:
//
//   produce | load i + 1, left    | load i + 1, right       |
//   score   | S, dP of i ...| P, dS | dQ, left  | some contributions | S, dP of i + 1 ...
//   add     | contributions of i - 1 ... | dQ, right | contributions of i ...
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "cuda/backward/sm90/tile.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/wgmma.cuh"
#include "mla/backward.h"
#include "mla/number.h"

namespace mla::cuda::sm90::backward::many_heads {

constexpr int kHeads = kHopperGroupHeads;
static_assert(kMaxBackwardHeads <= 2 * kHeads);
constexpr int kGroupThreads = 128;
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kProducerWarps = 4;
constexpr int kWarpRows = kTileTokens / kProducerWarps;  // of a tile, a producer warp's

// A block begins with 168 registers a thread, handed round.
constexpr int kScorerRegisters = 232;
constexpr int kAdderRegisters = 224;
constexpr int kProducerRegisters = 48;
static_assert(kScorerRegisters + kAdderRegisters + kProducerRegisters <= 3 * 168);

// Blocks of 64 dims whose contributions the first warpgroup computes; the second one does the others.
constexpr int kScorerChunks = 3;

constexpr int kStep = 16;  // what a wgmma sums over
constexpr int kSteps = kTileTokens / kStep;
constexpr int kStepBytes = kStep * kRowBytes;                     // of a factor whose rows are what is summed over
constexpr int kArrivals = kProducerWarps * (32 + kWarpArrivals);  // at what the producers fill

template <int kBlocks>
struct Shared {
  alignas(1024) uint8_t k[kBlocks][kBlockBytes];
  alignas(1024) uint8_t q[kBlocks][kBlockBytes];
  alignas(1024) uint8_t d_out[kLatentBlocks][kBlockBytes];
  alignas(1024) uint8_t weights[kBlockBytes];  // P, rows of heads
  alignas(1024) uint8_t grads[kBlockBytes];    // dS
  uint8_t valid[2][kTileTokens];               // of even and odd tiles
  Barrier k_full[2], k_empty[2];               // the left 256 dims and the others
  Barrier q_full, q_empty;                     // and d_out
  Barrier grads_full, grads_empty;             // and weights
};
static_assert(sizeof(Shared<9>) <= 227 * 1024);

// A block's work, one query after the other.
struct Item {
  int query, group, entries, tiles;

  __device__ Item(const BackwardProblem& p, int number) {
    const bool two = p.groups > 1;  // there are no more
    group = two ? number % 2 : 0;
    query = p.first + (two ? number / 2 : number);
    entries = p.lists.entries(query);
    tiles = (entries + kTileTokens - 1) / kTileTokens;
  }
  static __device__ int count(const BackwardProblem& p) { return p.count * p.groups; }
  __device__ int head_begin() const { return group * kHeads; }
};

template <int kBlocks>
struct Consumer {
  const BackwardProblem& p;
  Shared<kBlocks>& s;
  const int warp, lane;  // warp of the warpgroup

  // Asks for the contributions of 64 dims.
  __device__ void start_contribution(float (&sum)[32], int block) {
    using Atom = Bf16Atom<64, Major::MN, Major::MN>;
    const uint64_t weights = describe_atoms(cast_smem_ptr_to_uint(s.weights)),
                   d_out = describe_atoms(cast_smem_ptr_to_uint(s.d_out)),
                   q = describe_atoms(cast_smem_ptr_to_uint(s.q));
    fence_sums(sum);
    cute::warpgroup_arrive();
    if (block < kLatentBlocks) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        multiply<Atom>(sum, weights + (step * kStepBytes >> 4),
                       d_out + ((block * kBlockBytes + step * kStepBytes) >> 4), step > 0);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      multiply<Atom>(sum, weights + ((kBlockBytes + step * kStepBytes) >> 4),
                     q + ((block * kBlockBytes + step * kStepBytes) >> 4), block < kLatentBlocks || step > 0);
    cute::warpgroup_commit_batch();
  }

  // Contributions of a tile's blocks kBegin to kEnd - 1; the sums of the warpgroup's dQ have been asked for before and
  // `release` is called when they are there.
  template <int kBegin, int kEnd, typename Release>
  __device__ void contribute(const Item& item, int tile, int parity, Release release) {
    const int lane = hidden(this->lane);
    const int entry = warp * 16 + lane / 4;
    const LaneRows rows{
        p.contribution(item.group, item.query, tile * kTileTokens) + entry * kWidth<kBlocks> + lane % 4 * kPieceNumbers,
        8 * kWidth<kBlocks>,
        {s.valid[parity][entry] != 0, s.valid[parity][entry + 8] != 0}};
    float sum[32];
    uint32_t pairs[16];
    start_contribution(sum, kBegin);
    cute::warpgroup_wait<1>();
    release();
#pragma unroll
    for (int block = kBegin; block < kEnd; ++block) {
      cute::warpgroup_wait<0>();
      fence_sums(sum);
      pack_sums(pairs, sum);
      if (block + 1 < kEnd) start_contribution(sum, block + 1);
      rows.store(pairs, block, lane);
    }
  }

  // Writes a query's dQ, blocks from kBegin on.
  template <int kBegin, int kSums>
  __device__ void write(const Item& item, const float (&sum)[kSums]) {
    const int lane = hidden(this->lane);
    const int head = item.head_begin() + warp * 16 + lane / 4;
    const LaneRows rows{p.d_q + item.query * p.d_q_token + head * p.d_q_head + lane % 4 * kPieceNumbers,
                        8 * p.d_q_head,
                        {head < p.heads, head + 8 < p.heads}};
    uint32_t pairs[16];
    write_blocks<kBegin, 0>(rows, pairs, sum, lane);
  }

 private:
  template <int kBegin, int kBlock, int kSums>
  __device__ void write_blocks(const LaneRows& rows, uint32_t (&pairs)[16], const float (&sum)[kSums], int lane) {
    if constexpr (32 * kBlock < kSums) {
      pack_sums<32 * kBlock>(pairs, sum);
      rows.store(pairs, kBegin + kBlock, lane);
      write_blocks<kBegin, kBlock + 1>(rows, pairs, sum, lane);
    }
  }
};

template <int kCount>
__device__ void clear(float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
}

// S, dP, P and dS; the left 256 dims of dQ; some contributions.
template <int kBlocks>
struct Scorer : Consumer<kBlocks> {
  using Base = Consumer<kBlocks>;
  using Base::lane, Base::p, Base::s, Base::warp;
  using ScoreAtom = Bf16Atom<64, Major::K, Major::K>;
  using QueryAtom = gmma::MMA_64x256x16_F32BF16BF16_RS<Major::K, Major::MN>;

  float lse2[2], delta[2];  // of heads lane / 4 and that plus 8
  float d_q[128];

  static __device__ constexpr int half(int i) { return i / 2 % 2; }

  __device__ void load_statistics(const Item& item) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = item.head_begin() + warp * 16 + lane / 4 + 8 * h;
      const bool exists = head < p.heads;
      const int64_t at = int64_t{item.query} * p.heads + head;
      lse2[h] = exists ? p.lse2[at] : INFINITY;
      delta[h] = exists ? p.delta[at] : 0.0f;
    }
  }

  // Multiplies blocks [begin, end) of the rows of heads at `a` with those of the tile.
  __device__ void multiply_rows(float (&sum)[32], uint64_t a, uint64_t k, int begin, int end) {
#pragma unroll
    for (int block = begin; block < end; ++block)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t offset = (block * kBlockBytes + step * kStep * 2) >> 4;
        multiply<ScoreAtom>(sum, a + offset, k + offset, block > 0 || step > 0);
      }
  }

  // The lane's stmatrix address of a step's 16 entries: rows of heads.
  __device__ uint32_t tiles_address(int step) const {
    const int row = warp * 16 + lane % 8 + lane / 8 % 2 * 8, piece = 2 * step + lane / 16;
    return cast_smem_ptr_to_uint(s.weights) + row * kRowBytes + (piece ^ row % 8) * kPieceBytes;
  }

  __device__ void run() {
    int n = 0, queries = 0;
    for (int number = blockIdx.x; number < Item::count(p); number += gridDim.x) {
      const Item item(p, number);
      load_statistics(item);
      clear(d_q);
      if (item.tiles > 0) wait(s.q_full, queries % 2);
      for (int tile = 0; tile < item.tiles; ++tile, ++n) {
        float score[32], d_weight[32];
        const uint64_t k = describe_atoms(cast_smem_ptr_to_uint(s.k)), q = describe_atoms(cast_smem_ptr_to_uint(s.q)),
                       d_out = describe_atoms(cast_smem_ptr_to_uint(s.d_out));
        wait(s.k_full[0], n % 2);
        publish_to_wgmma();
        fence_sums(score);
        fence_sums(d_weight);
        cute::warpgroup_arrive();
        multiply_rows(score, q, k, 0, kHalfBlocks);
        multiply_rows(d_weight, d_out, k, 0, kHalfBlocks);
        wait(s.k_full[1], n % 2);
        publish_to_wgmma();
        cute::warpgroup_arrive();
        multiply_rows(score, q, k, kHalfBlocks, kBlocks);
        cute::warpgroup_commit_batch();
        multiply_rows(d_weight, d_out, k, kHalfBlocks, kLatentBlocks);
        cute::warpgroup_commit_batch();

        cute::warpgroup_wait<1>();
        fence_sums(score);
        uint32_t pairs[kSteps][4];
        weigh(score, n % 2);
        wait(s.grads_empty, n % 2 ^ 1);
        pack(pairs, score);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) store_tiles(tiles_address(step), pairs[step]);
        cute::warpgroup_wait<0>();
        fence_sums(d_weight);
#pragma unroll
        for (int i = 0; i < 32; ++i) d_weight[i] = score[i] * p.scale * (d_weight[i] - delta[half(i)]);
        pack(pairs, d_weight);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) store_tiles(tiles_address(step) + kBlockBytes, pairs[step]);
        publish_to_wgmma();
        arrive_as_warp(s.grads_full);

        const uint64_t values = describe_atoms(cast_smem_ptr_to_uint(s.k), kBlockBytes);
        fence_sums(d_q);
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          multiply<QueryAtom>(d_q, pairs[step], values + (step * kStepBytes >> 4));
        cute::warpgroup_commit_batch();
        wait(s.grads_full, n % 2);  // of the other warps
        this->template contribute<0, kScorerChunks>(item, tile, n % 2, [&] {
          fence_sums(d_q);
#pragma unroll
          for (int step = 0; step < kSteps; ++step)
            for (uint32_t& pair : pairs[step]) hide(pair);  // they have to stay until now
          arrive_as_warp(s.k_empty[0]);
        });
        arrive_as_warp(s.grads_empty);
      }
      if (item.tiles > 0) arrive_as_warp(s.q_empty), ++queries;
      this->template write<0>(item, d_q);
    }
  }

  // Scores become weights, zero for entries that are none.
  __device__ void weigh(float (&score)[32], int parity) {
    const float scale2 = p.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < 32; ++i) score[i] = exp2_approximate(fmaf(score[i], scale2, -lse2[half(i)]));
    const uint16_t two = *reinterpret_cast<const uint16_t*>(s.valid[parity] + 2 * lane);
    if (__all_sync(~0u, two == 0x0101)) return;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (!s.valid[parity][i / 4 * 8 + lane % 4 * 2 + i % 2]) score[i] = 0.0f;
  }

  __device__ void pack(uint32_t (&pairs)[kSteps][4], const float (&number)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) pairs[i / 8][i / 2 % 4] = pack_bf16(number[i], number[i + 1]);
  }
};

// The right dims of dQ, and most contributions.
template <int kBlocks>
struct Adder : Consumer<kBlocks> {
  using Base = Consumer<kBlocks>;
  using Base::lane, Base::p, Base::s, Base::warp;
  using LeftAtom = gmma::MMA_64x256x16_F32BF16BF16_SS<Major::K, Major::MN>;
  using RightAtom = Bf16Atom<64, Major::K, Major::MN>;

  float d_q[(kBlocks - kHalfBlocks) * 32];

  __device__ void run() {
    int n = 0;
    for (int number = blockIdx.x; number < Item::count(p); number += gridDim.x) {
      const Item item(p, number);
      clear(d_q);
      for (int tile = 0; tile < item.tiles; ++tile, ++n) {
        wait(s.grads_full, n % 2);
        publish_to_wgmma();
        const uint64_t values = describe_atoms(cast_smem_ptr_to_uint(s.k[kHalfBlocks]), kBlockBytes),
                       grads = describe_atoms(cast_smem_ptr_to_uint(s.grads));
        fence_sums(d_q);
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const uint64_t a = grads + (step * kStep * 2 >> 4), b = values + (step * kStepBytes >> 4);
          multiply<LeftAtom>(d_q, a, b);
          if constexpr (kBlocks > kLatentBlocks) multiply<RightAtom, 128>(d_q, a, b + (kHalfBytes >> 4));
        }
        cute::warpgroup_commit_batch();
        this->template contribute<kScorerChunks, kBlocks>(item, tile, n % 2, [&] {
          fence_sums(d_q);
          arrive_as_warp(s.k_empty[1]);
        });
        arrive_as_warp(s.grads_empty);
      }
      if (item.tiles > 0) arrive_as_warp(s.q_empty);
      this->template write<kHalfBlocks>(item, d_q);
    }
  }
};

// A producer warp's rows of a query's Q and dO; zeros for heads that it does not have.
template <int kBlocks>
__device__ __forceinline__ void copy_queries(const BackwardProblem& p, Shared<kBlocks>& s, const Item& item, int first,
                                             int lane) {
  const int head = first + lane % kWarpRows;
  const auto own = [&](int64_t head_stride) {
    return item.head_begin() + head < p.heads ? head * static_cast<uint32_t>(head_stride / kPieceNumbers) : kNoRow;
  };
  const uint32_t q = cast_smem_ptr_to_uint(s.q), d_out = cast_smem_ptr_to_uint(s.d_out);
  const uint16_t* q_rows = p.q + item.query * p.q_token + item.head_begin() * p.q_head;
  copy_rows<kWarpRows, kBlocks, 0>(q, first, q_rows, own(p.q_head), lane);
  copy_rows<kWarpRows, kBlocks, 1>(q, first, q_rows, own(p.q_head), hidden(lane));
  const uint16_t* d_out_rows = p.d_out + item.query * p.d_out_token + item.head_begin() * p.d_out_head;
  copy_rows<kWarpRows, kLatentBlocks, 0>(d_out, first, d_out_rows, own(p.d_out_head), hidden(lane));
  copy_rows<kWarpRows, kLatentBlocks, 1>(d_out, first, d_out_rows, own(p.d_out_head), hidden(lane));
}

// A producer warp: its rows of each tile, and of a query's Q and dO once its first tile is under way.
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
      const uint32_t row = p.lists.names(next) ? next * static_cast<uint32_t>(p.kv_row / kPieceNumbers) : kNoRow;
      next = load((tile + 1) * kTileTokens + own);
      const uint32_t k = cast_smem_ptr_to_uint(s.k);
      wait(s.k_empty[0], n % 2 ^ 1);
      if (lane < kWarpRows) s.valid[n % 2][own] = row != kNoRow;
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

template <int kBlocks>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ BackwardProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kBlocks>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) s.k_full[i].init(kArrivals), s.k_empty[i].init(4 * kWarpArrivals);
    s.q_full.init(kArrivals), s.q_empty.init(8 * kWarpArrivals);
    s.grads_full.init(4 * kWarpArrivals), s.grads_empty.init(8 * kWarpArrivals);
  }
  __syncthreads();
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_alloc<kScorerRegisters>();
    Scorer<kBlocks>{{p, s, warp, lane}}.run();
  } else if (warp < 8) {
    cutlass::arch::warpgroup_reg_alloc<kAdderRegisters>();
    Adder<kBlocks>{{p, s, warp - 4, lane}}.run();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    produce<kBlocks>(p, s, warp - 8, lane);
  }
}

}  // namespace mla::cuda::sm90::backward::many_heads
