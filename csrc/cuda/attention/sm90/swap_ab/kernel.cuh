// Sparse attention for up to 16 heads per CTA on Hopper, and for up to 32 with fp8_ds_mla and nvfp4_352 rows. Operands
// are swapped: tokens are the 64 rows of wgmma and heads its columns, so that few heads fill the instruction.
//
//   scores  S^T [64 tokens x heads] = K [64 x 576] Q^T     (or 512)
//   values  O^T [512 dims x heads] += V^T [512 x 64] P^T
//
// Two consumer warpgroups take every other tile each, with a softmax and accumulators of their own. They wait for each
// other only at the end of a token, where their results are added in a reduction buffer (the memory of the token's last
// tile, or its own if a tile is too small). If the token is split, its partial results are then combined
// (split_tokens.cuh). Eight producer warps load rows. The layout of rows and their products depend on the cache's
// format: fp8_rows.cuh, nvfp4_rows.cuh, plain_rows.cuh.
//
//   load     | rows of i + 4 ...
//   group 0  | scores i, softmax i, values i | scores i + 2, ...
//   group 1           | scores i + 1, softmax i + 1, values i + 1 | ...
//
// A tile costs a warpgroup one barrier. P is computed with the row max so far and stored. The barrier then
// tells whether any warp saw a P above 2^8. Only then are maxima exchanged, accumulators rescaled and P
// computed again. The result is as exact either way: f16 has room for 2^8.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "cuda/attention/sm90/swap_ab/config.h"
#include "cuda/attention/sm90/results.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::swap_ab {

// Named barriers of the consumer warpgroups: 1 and 2; 3 is for both.
constexpr int kGroupThreads = 128;
__device__ __forceinline__ int group_barrier(int group) { return 1 + group; }
constexpr int kBothGroups = 3;

template <Rows kRows, int kHeads, Form kForm>
struct Consumer {
  using Memory = Shared<kRows, kHeads>;
  using Own = RowsOf<kRows, kHeads>;
  static constexpr bool kMaxLogits = kForm == Form::sparse_max_logits, kDense = kForm == Form::dense;
  static constexpr int kAccRegisters = kHeads / 2;  // per lane, of 64 rows
  static constexpr int kColumns = kHeads / 4;       // a lane's heads
  // The reduction buffer holds the heads of one round.
  static constexpr int kRounds = kHeads / kReductionHeads<kHeads>, kRoundColumns = kColumns / kRounds;

  const AttentionProblem& p;
  Memory& s;
  const int head_begin;
  const int group, warp, lane;  // warp of the warpgroup
  Own rows;
  uint32_t probs_address;  // this lane's, of its warpgroup's P

  float out[kLatentBlocks][kAccRegisters];  // O^T
  float row_max[kColumns];                  // P is 2^(score - row_max); it may lag behind by kSlack
  float total[kColumns];                    // of the lane's rows
  float max_score[kMaxLogits ? kColumns : 1];
  float score[kAccRegisters];
#ifdef MLA_RACECHECK
  uint32_t group_syncs = 0;
#endif

  static __device__ constexpr int column(int i) { return i / 4 * 2 + i % 2; }
  static __device__ constexpr int half(int i) { return i / 2 % 2; }  // row lane / 4, or that plus 8
  __device__ int head(int column) const { return column / 2 * 8 + lane % 4 * 2 + column % 2; }

  // The lane's stmatrix address: a head's row of an 8 x 8 tile, eight tokens. Hidden, so that the compiler does not
  // derive wgmma descriptors from it, which must be uniform.
  __device__ void find_probs_address() {
    const int own_head = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    probs_address = s.probs[group].address() + own_head * kRowBytes + offset_in_row(lane % 8, piece);
    hide(probs_address);
  }

  __device__ void start_token() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      row_max[c] = kLowest;
      if constexpr (kMaxLogits) max_score[c] = kLowest;
      total[c] = 0.0f;
    }
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kAccRegisters; ++i) out[b][i] = 0.0f;
  }

  // Computes and stores P with the current row_max.
  __device__ void store_probs(float (&prob)[kAccRegisters]) {
#pragma unroll
    for (int i = 0; i < kAccRegisters; ++i) prob[i] = exp2_approximate(score[i] - row_max[column(i)]);
    constexpr int kPairs = kRoundColumns;  // per store, of 8 or 16 heads
#pragma unroll
    for (int first = 0; first < kAccRegisters / 2; first += kPairs) {
      uint32_t pairs[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        pairs[i] = rows.pack(prob[2 * (first + i)], prob[2 * (first + i) + 1], half(2 * i));
      store_tiles_transposed(probs_address + first / kPairs * kReductionHeads<kHeads> * kRowBytes, pairs);
    }
  }

  // Heads of a request's earlier queries see less of the last tiles.
  __device__ void hide_later_slots(const CtaWork& cta, int token, int tile) {
    const TokenWork work = cta.work(token);
    const int slot = warp * 16 + lane / 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int seen = cta.seen_of_tile(work, work.tile_begin + tile, head_begin + head(c)), i = c / 2 * 4 + c % 2;
      if (slot >= seen) score[i] = -INFINITY;
      if (slot + 8 >= seen) score[i + 2] = -INFINITY;
    }
  }

  // A warpgroup's first tile of a token always raises row_max, so there is no vote.
  __device__ void softmax(bool first) {
    float prob[kAccRegisters];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < kAccRegisters; ++i) {
      if constexpr (kMaxLogits) max_score[column(i)] = fmaxf(max_score[column(i)], score[i]);
      grows |= score[i] + rows.lift(half(i)) > row_max[column(i)] + kSlack;
    }
    if (!first) {
      store_probs(prob);
      fence_async_shared();
    }
    if (first || sync_named_or<kGroupThreads>(group_barrier(group), grows)) {
      raise_row_max();
      store_probs(prob);
      fence_async_shared();
      sync_named<kGroupThreads>(group_barrier(group));
    }
#pragma unroll
    for (int i = 0; i < kAccRegisters; ++i) total[column(i)] += prob[i];
  }

  __device__ void raise_row_max() {
    float top[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = c / 2 * 4 + c % 2;
      top[c] = fmaxf(score[i] + rows.lift(0), score[i + 2] + rows.lift(1));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], distance));
      if (lane < 4) s.warp_max[group][warp][head(c)] = top[c];
    }
    sync_named<kGroupThreads>(group_barrier(group));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float raised = row_max[c];
#pragma unroll
      for (int w = 0; w < 4; ++w) raised = fmaxf(raised, s.warp_max[group][w][head(c)]);
      const float rescale = exp2_approximate(row_max[c] - raised);
      row_max[c] = raised;
      total[c] *= rescale;
#pragma unroll
      for (int b = 0; b < kLatentBlocks; ++b) {
        out[b][c / 2 * 4 + c % 2] *= rescale;
        out[b][c / 2 * 4 + c % 2 + 2] *= rescale;
      }
    }
  }

  // Stores the warpgroup's softmax statistics for the other one, once those of two reductions ago have been read.
  // `round` is the first round of this reduction.
  __device__ void store_statistics(uint32_t round) {
    const int slot = round / kRounds % 2;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        total[c] += __shfl_xor_sync(~0u, total[c], distance);
        if constexpr (kMaxLogits) max_score[c] = fmaxf(max_score[c], __shfl_xor_sync(~0u, max_score[c], distance));
      }
    wait_for_reduction_empty(round, 2);
    if (lane >= 4) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      s.total[slot][group][warp][head(c)] = total[c];
      s.max_score[slot][group][warp][head(c)] = kMaxLogits ? max_score[kMaxLogits ? c : 0] : kLowest;
      if (warp == 0) s.row_max[slot][group][head(c)] = row_max[c];
    }
  }

  // Waits until the buffer of `ago` rounds (one or two) before this one has been read.
  __device__ void wait_for_reduction_empty(uint32_t round, uint32_t ago) {
    wait(s.reduction_empty[(round - ago) % 2], (round - ago) / 2 % 2);
  }

  // A head's row of the reduction buffer. A lane has 16 dims of it.
  __device__ float* reduction_row(int stage, int head) {
    return static_cast<float*>(s.rows.reduction_buffer(stage)) + rows.reduction_row(head) * kReductionStride;
  }
  __device__ float& acc_of(int column, int i) { return out[i / 2][column / 2 * 4 + 2 * (i % 2) + column % 2]; }

  // The end of a token that is not combined here: the warpgroup with the last tile stores its output in the reduction
  // buffer ...
  __device__ void store_for_reduction(int stage, uint32_t reductions) {
    const uint32_t first = reductions * kRounds;
    store_statistics(first);
    // the other warps may still read the tile
    sync_named<kGroupThreads>(group_barrier(group));
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (!Own::kReducesInTile || round > 0) wait_for_reduction_empty(first + round, 1);
#pragma unroll
      for (int c = round * kRoundColumns; c < (round + 1) * kRoundColumns; ++c) store_column(c, stage);
      arrive_as_warp(s.reduction_full[(first + round) % 2]);
    }
  }

  // ... and the other one adds its own, if it had any tile, and writes the results: to the output, or as a partial
  // result for the combining kernel.
  __device__ void reduce(const TokenWork& work, int64_t partial, int own_tiles, int stage, uint32_t reductions) {
    const uint32_t first = reductions * kRounds;
    const int slot = reductions % 2;
    store_statistics(first);
    float mine[kColumns], theirs[kColumns];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      wait(s.reduction_full[(first + round) % 2], (first + round) / 2 % 2);
      if (round == 0) {
        sync_named<kGroupThreads>(group_barrier(group));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) find_factors(mine[c], theirs[c], c, slot);
        if (const int own = threadIdx.x % kGroupThreads; own < kHeads) {
          const Statistics both = statistics_of_head(slot, own);
          s.factor[own] = finish_head(p, work.token, head_begin + own, work.whole(), partial, both.total, both.row_max,
                                      both.max_score);
        }
      }
      if (own_tiles > 0) {
#pragma unroll
        for (int c = round * kRoundColumns; c < (round + 1) * kRoundColumns; ++c)
          add_to_row(c, mine[c], theirs[c], stage);
      }
      sync_named<kGroupThreads>(group_barrier(group));
      constexpr int kRoundHeads = kReductionHeads<kHeads>;
      for (int own = round * kRoundHeads + warp; own < (round + 1) * kRoundHeads && head_begin + own < p.heads;
           own += 4)
        write_row<number_of(kRows)>(p, work.token, head_begin + own, work.whole(), partial, reduction_row(stage, own),
                                    s.factor[own], lane);
      arrive_as_warp(s.reduction_empty[(first + round) % 2]);
    }
    arrive_as_warp(s.empty[stage]);
  }

  // The factors that bring a column's accumulators and the other warpgroup's to the same row maximum.
  __device__ void find_factors(float& mine, float& theirs, int column, int slot) const {
    const float other = s.row_max[slot][1 - group][head(column)], raised = fmaxf(row_max[column], other);
    mine = exp2_approximate(row_max[column] - raised);
    theirs = exp2_approximate(other - raised);
  }

  __device__ void store_column(int column, int stage) {
    float acc[2 * kLatentBlocks];
#pragma unroll
    for (int k = 0; k < 2 * kLatentBlocks; ++k) acc[k] = acc_of(column, k);
    rows.put(reduction_row(stage, head(column)), acc);
  }

  // All loads precede the first store, or each load would wait for the store before it.
  __device__ void add_to_row(int column, float mine, float theirs, int stage) {
    float* const row = reduction_row(stage, head(column));
    float acc[2 * kLatentBlocks];
    rows.get(acc, row);
#pragma unroll
    for (int k = 0; k < 2 * kLatentBlocks; ++k) acc[k] = add_in_any_order(acc_of(column, k) * mine, acc[k] * theirs);
    rows.put(row, acc);
  }

  // A head's softmax statistics over both warpgroups.
  struct Statistics {
    float row_max, total, max_score;
  };
  __device__ Statistics statistics_of_head(int slot, int own) const {
    const int other = 1 - group;
    const float a = s.row_max[slot][group][own], b = s.row_max[slot][other][own], raised = fmaxf(a, b);
    float totals[2] = {}, max_score = kLowest;
    for (int w = 0; w < 4; ++w) {
      totals[0] += s.total[slot][group][w][own], totals[1] += s.total[slot][other][w][own];
      max_score = fmaxf(max_score, fmaxf(s.max_score[slot][group][w][own], s.max_score[slot][other][w][own]));
    }
    const float total =
        add_in_any_order(totals[0] * exp2_approximate(a - raised), totals[1] * exp2_approximate(b - raised));
    return {raised, total, max_score};
  }

  // The same for a split that this kernel combines. Other CTAs wait for it, so both warpgroups work: each stores half
  // of its columns, and adds the other half to what the other one stored.
  template <int kGroup>
  __device__ void reduce_split(int stage, uint32_t reductions) {
    static_assert(kRounds == 1);
    constexpr int kHalf = kColumns / 2, kLeft = kGroup == 0 ? kHalf : 0, kAdded = kHalf - kLeft;
    const int slot = reductions % 2;
    store_statistics(reductions);
    sync_groups();  // both warpgroups have read the tile
#pragma unroll
    for (int c = kLeft; c < kLeft + kHalf; ++c) store_column(c, stage);
    if (warp == 3 && lane < kHeads / 2) {
      const int own = kGroup * (kHeads / 2) + lane;
      const Statistics both = statistics_of_head(slot, own);
      s.split[own] = {both.total == 0.0f ? -INFINITY : both.row_max, both.total, both.max_score,
                      cast_smem_ptr_to_uint(reduction_row(stage, own))};
    }
    float mine[kHalf], theirs[kHalf];
#pragma unroll
    for (int c = 0; c < kHalf; ++c) find_factors(mine[c], theirs[c], kAdded + c, slot);
    sync_groups();
#pragma unroll
    for (int c = 0; c < kHalf; ++c) add_to_row(kAdded + c, mine[c], theirs[c], stage);
  }

  // Both warpgroups wait for each other. For racecheck it is an mbarrier: with a named barrier it would not order one
  // group's later arrivals at mbarriers after the other group's accesses.
  __device__ void sync_groups() {
#ifdef MLA_RACECHECK
    arrive_as_warp(s.groups_met);
    wait(s.groups_met, group_syncs++ % 2);
#else
    sync_named<2 * kGroupThreads>(kBothGroups);
#endif
  }

  // Both warpgroups combine the CTA's split of a token with the token's other splits.
  __device__ void combine_split(const TokenWork& work) {
    sync_groups();
    const SplitTokens& shared = s.split_tokens;
    const ClusterPeers peers = shared.peers;
    if (peers.count > 1 && group == 0 && warp == 0) {
      release_shared();
      peers.arrive(s.cluster_full, lane);
    }
    // The reduction buffer of the lane's peer, in its last tile's stage: it has no tiles but those of its split.
    const int tiles = shared.tiles[peers.first + min(lane, peers.count - 1)];
    const uint32_t first_row =
        cast_smem_ptr_to_uint(s.rows.reduction_buffer((tiles > 0 ? tiles - 1 : 0) % Own::kStages));
    if (peers.count > 1) wait_for_ctas(s.cluster_full, 0);
    const auto row_of_head = [&](int own) {
      return first_row + rows.reduction_row(own) * kReductionStride * static_cast<int>(sizeof(float));
    };
    const auto release = [&] {
      if (peers.count > 1)
        peers.arrive(s.cluster_empty, lane);
      else
        sync_groups();
    };
    combine_splits<number_of(kRows), kHeads>(p, s.split, work.token, shared.splits[work.split == TokenWork::kContinued],
                                             peers, head_begin, 4 * group + warp, lane, row_of_head, release);
    if (peers.count > 1) wait_for_ctas(s.cluster_empty, 0);  // peers have read this CTA's memory
  }

  // Loads the queries of the first token with tiles: consumers are idle until the first rows arrive. Barriers may be
  // used from here on.
  __device__ void produce_first_queries(const CtaWork& cta) {
    int token = cta.token_begin;
    for (; token < cta.token_end; ++token) {
      const TokenWork work = cta.work(token);
      if (work.tile_end > work.tile_begin) break;
    }
    if (token < cta.token_end)
      Own::produce_queries(p, s, 0, token, head_begin, 4 * group + warp, lane, [] { wait_for_cluster(); });
    else
      wait_for_cluster();
  }

  __device__ void run(const CtaWork& cta) {
    const bool finds_splits =
        !kCombinedLater<kHeads> && group == 1 && warp == 3;  // its group starts with the second tile
    Neighbours neighbours;
    if (finds_splits) neighbours.load(cta, lane);
    produce_first_queries(cta);
    if (finds_splits) s.split_tokens.store(cta, neighbours, kTileTokens, lane);
    find_probs_address();
    uint32_t ordinal = 0, visits = 0, tokens = 0;  // tiles of both groups, own tiles, tokens with tiles
    uint32_t reductions = 0;                       // of store_for_reduction() and reduce()
    int last = 0;                                  // stage of a token's last tile
    for (int token = cta.token_begin; token < cta.token_end; ++token) {
      const TokenWork work = cta.work(token);
      const int tiles = work.tile_end - work.tile_begin;
      const int hidden_from = kDense ? cta.first_hidden_tile(work) - work.tile_begin : 0;
      if (tiles > 0) {
        const int own_tiles = (tiles + (ordinal % 2 == group)) / 2, query = tokens % Own::kQueries;
        wait(s.q_full[query], tokens / Own::kQueries % 2);
        start_token();
        if (own_tiles == 0) arrive_as_warp(s.q_empty[query]);
        for (int i = 0; i < own_tiles; ++i, ++visits) {
          const uint32_t tile = ordinal + 2 * i + (ordinal % 2 != group), stage = tile % Own::kStages;
          wait(s.full[stage], tile / Own::kStages % 2);
          fence_async_shared();
          rows.compute_scores(score, s.rows, stage, query, s.q_scale[query]);
          if (i == own_tiles - 1) arrive_as_warp(s.q_empty[query]);
          if (kDense && static_cast<int>(tile - ordinal) >= hidden_from) hide_later_slots(cta, token, tile - ordinal);
          wait(s.probs_free[group], visits % 2 ^ 1);
          softmax(i == 0);
          add_values(stage, tile == ordinal + tiles - 1);
          arrive_as_warp(s.probs_free[group]);
        }
        ordinal += tiles;
        last = (ordinal - 1) % Own::kStages;
        if (kCombinedLater<kHeads> || work.whole()) {
          if (ordinal % 2 != group)
            store_for_reduction(last, reductions);
          else
            reduce(work, cta.partial(work), own_tiles, last, reductions);
          ++reductions;
        } else if constexpr (!kCombinedLater<kHeads>) {
          group == 0 ? reduce_split<0>(last, reductions) : reduce_split<1>(last, reductions);
        }
        ++tokens;
      } else if (!kCombinedLater<kHeads> && !work.whole()) {
        if (threadIdx.x < kHeads) s.split[threadIdx.x] = {-INFINITY, 0.0f, kLowest, s.probs[0].address()};
      } else if (group == 0) {
        write_empty(work, cta.partial(work));
      }
      if (kCombinedLater<kHeads> || work.whole()) continue;
      if constexpr (!kCombinedLater<kHeads>) combine_split(work);
      if (tiles > 0 && ordinal % 2 == group) arrive_as_warp(s.empty[last]);
    }
  }

  // `keep`: a token's last tile is not released, because its memory becomes the reduction buffer.
  __device__ void add_values(int stage, bool keep) {
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b) fence_acc(out[b]);
    rows.add_values(out, s.rows, stage, s.probs[group].address(), [&] {
      if (!keep) arrive_as_warp(s.empty[stage]);
    });
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b) fence_acc(out[b]);
  }

  __device__ void write_empty(const TokenWork& work, int64_t partial) {
    for (int own = warp; own < kHeads && head_begin + own < p.heads; own += 4) {
      const int head = head_begin + own;
      if (lane == 0) finish_head(p, work.token, head, work.whole(), partial, 0.0f, kLowest, kLowest);
      write_row<number_of(kRows)>(p, work.token, head, work.whole(), partial, nullptr, 0.0f, lane);
    }
  }
};

// blockIdx.x: a group of heads, y: the plan's entry.
template <Rows kRows, int kHeads, Form kForm>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionProblem p) {
  using Own = RowsOf<kRows, kHeads>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kRows, kHeads>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Own::kStages; ++i) s.full[i].init(Own::kTileArrivals), s.empty[i].init(4 * kWarpArrivals);
    for (int i = 0; i < kConsumerGroups; ++i) s.probs_free[i].init(4 * kWarpArrivals);
    for (int i = 0; i < Own::kQueries; ++i)  // eight warps load queries
      s.q_full[i].init(8 * kWarpArrivals), s.q_empty[i].init(kConsumerWarps * kWarpArrivals);
    for (int i = 0; i < 2; ++i)
      s.reduction_full[i].init(4 * kWarpArrivals), s.reduction_empty[i].init(4 * kWarpArrivals);
#ifdef MLA_RACECHECK
    s.groups_met.init(2 * kGroupThreads);
#endif
    s.cluster_full.init(ctas_of_cluster());
    s.cluster_empty.init(kConsumerWarps * ctas_of_cluster());
    s.touched = touch(p);
  }
  cute::cluster_arrive();  // all wait for it after they have issued their first loads
  const int head_begin = blockIdx.x * kHeads;
  const int warp = warp_of_cta(), lane = threadIdx.x % 32;
  if (warp < kConsumerWarps) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters<kRows, kHeads>>();
    pdl_wait();
    pdl_launch_dependents();
    Consumer<kRows, kHeads, kForm> consumer{p, s, head_begin, warp / 4, warp % 4, lane, {warp % 4, lane}};
    consumer.run(CtaWork(p, blockIdx.y, kTileTokens));
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters<kRows, kHeads>>();
    pdl_wait();
    Own::template produce<kForm == Form::dense>(p, s, head_begin, warp - kConsumerWarps, lane);
  }
}

}  // namespace mla::cuda::sm90::swap_ab
