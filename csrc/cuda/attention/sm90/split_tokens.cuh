// Combines the partial results of split tokens in the launch that computes them, in two steps.
//
//   in a cluster   CTAs whose whole work is a split of the same token read one another's results from shared memory;
//                  each combines some of the heads
//   in the grid    the results of that go to the workspace. A counter tells who stores the last one for a quarter of a
//                  head's row; that warp combines them
//
// No CTA waits for one outside its cluster, which may not have started yet. Partial results are added in a fixed order,
// so the bits don't depend on who comes last.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/tile.h"
#include "cuda/attention/work.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/warp.cuh"
#include "mla/number.h"
#include "mla/problem.h"
#include "mla/softmax.h"

namespace mla::cuda::sm90 {

constexpr int kQuarters = Partials::kArrivalsPerRow;
constexpr int kQuarter = kValueDim / kQuarters;  // dims; four per lane
constexpr int kShareQuarters = 2;                // most that a warp has of a row
static_assert(kQuarter == 4 * 32);

// The CTAs of this CTA's cluster whose whole work is a split of the same token: ranks `first` to `first + count - 1`.
// This CTA is number `own` of them.
struct ClusterPeers {
  int first, count, own;

  // A warp arrives at the barrier of every peer, after all that its lanes have done. A barrier expects all CTAs of
  // the cluster, so each CTA also arrives at its own for those that are no peers.
  __device__ void arrive(Barrier& barrier, int lane) const {
    __syncwarp();
    if (lane < count) arrive_in_cta(cute::set_block_rank(cast_smem_ptr_to_uint(&barrier), first + lane), 1);
    const int others = static_cast<int>(ctas_of_cluster()) - count;
    if (lane == 0 && others > 0)
      arrive_in_cta(cute::set_block_rank(cast_smem_ptr_to_uint(&barrier), first + own), others);
  }
};

// The plan entries that this CTA depends on. All are loaded when the kernel begins, as their latency is high.
struct Neighbours {
  PlanEntry entry;  // of the cluster's CTA whose rank is the lane
  int splits;       // of the token that the CTA continues

  __device__ void load(const CtaWork& cta, int lane) {
    entry = CtaWork::entry_of(cta.p, index_of(cta, lane));
    splits = cta.p.plan[cta.owner()].splits;
  }

  static __device__ int index_of(const CtaWork& cta, int lane) {
    const int size = ctas_of_cluster();
    return lane < size ? cta.index - static_cast<int>(rank_in_cluster()) + lane : cta.p.ctas;
  }
};

// `tiles` becomes the number of tiles of the CTA whose rank is the lane, if its whole work is a split of one token.
__device__ __forceinline__ ClusterPeers find_peers(const CtaWork& cta, const Neighbours& neighbours, int max_tile_slots,
                                                   int lane, int& tiles) {
  const int size = ctas_of_cluster();
  const int rank = rank_in_cluster();
  ClusterPeers peers{rank, 1, 0};
  tiles = 0;
  if (size == 1) return peers;
  const CtaWork other(cta.p, Neighbours::index_of(cta, lane), neighbours.entry, max_tile_slots);
  bool single = other.token_end - other.token_begin == 1;
  if (single) {
    const TokenWork work = other.work(other.token_begin);
    single = !work.whole();
    tiles = work.tile_end - work.tile_begin;
  }
  const int token = single ? other.token_begin : -1, own_token = __shfl_sync(~0u, token, rank);
  const uint32_t same = __ballot_sync(~0u, single && token == own_token);
  if (!(same >> rank & 1)) return peers;
  const int first = __ffs(same) - 1, count = __popc(same);
  if (same >> first != (1u << count) - 1) return peers;  // a caller's plan, with splits that are no neighbours
  peers.first = first;
  peers.count = count;
  peers.own = rank - peers.first;
  return peers;
}

constexpr int kMostCtas = 16;  // CTAs per cluster

// Which splits a CTA has of the tokens that it shares with others. One warp stores this in shared memory when the
// kernel begins, to save registers.
struct SplitTokens {
  ClusterPeers peers;
  TokenSplit splits[2];  // of the token that is left open, and of the one that is continued
  int tiles[kMostCtas];  // of each CTA of the cluster, by rank

  __device__ void store(const CtaWork& cta, const Neighbours& neighbours, int max_tile_slots, int lane) {
    int own_tiles;
    const ClusterPeers found = find_peers(cta, neighbours, max_tile_slots, lane, own_tiles);
    if (lane < kMostCtas) tiles[lane] = own_tiles;
    if (lane > 0) return;
    peers = found;
    splits[0] = cta.opened_split(), splits[1] = cta.continued_split(neighbours.splits);
  }
};

// A CTA's softmax statistics of its split of a token, for its peers to read.
struct alignas(16) SplitResult {
  float row_max;    // to base 2; -inf if there is nothing to attend to
  float total;      // of 2^(score - row_max)
  float max_score;  // to base 2
  uint32_t acc;     // shared address of the head's 512 accumulators
};

__device__ __forceinline__ void add_weighted(float4& acc, float weight, float4 x) {
  acc.x += weight * x.x, acc.y += weight * x.y, acc.z += weight * x.z, acc.w += weight * x.w;
}

// What a warp combines of a head's row: one or two quarters, in each of which a lane has four numbers.
struct CombinedRow {
  float4 values[kShareQuarters];  // not yet divided by `total`
  float row_max = 0.0f, total = 0.0f;
  float max_logit = -INFINITY;

  // From statistics to base 2. All empty: nothing changes.
  __device__ void set(float row_max2, float new_total, float max_score) {
    if (row_max2 == -INFINITY) return;
    row_max = row_max2 * kLn2, total = new_total, max_logit = max_score * kLn2;
  }
  __device__ float lse() const { return lse_of(row_max, total); }
  __device__ float scale() const { return inverse_of(total); }
};

// A warp's share of the combination.
struct Share {
  int head, step, heads;  // heads `head`, `head + step`, ... below `heads`, of the CTA's
  int begin, end;         // quarters [begin, end) of each
};

__device__ __forceinline__ Share share_of(const ClusterPeers& peers, int warp, int heads) {
  if (peers.count <= 4)
    return {peers.own + peers.count * (warp / 2), 4 * peers.count, heads, warp % 2 * 2, warp % 2 * 2 + 2};
  return {peers.own + peers.count * (warp / 4), 2 * peers.count, heads, warp % 4, warp % 4 + 1};
}

template <Number kNumber>
__device__ __forceinline__ void write_combined(const AttentionProblem& p, int64_t token, int head, const Share& share,
                                               uint32_t quarters, int lane, const CombinedRow& combined) {
  const float lse = combined.lse();
  const float scale = with_sink(combined.scale() * p.value_scale, p, head, lse);
  uint16_t* out = p.out + p.offset(p.out_strides, token, head) + 4 * lane;
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) {
    if (!(quarters >> j & 1)) continue;
    const float4 x = combined.values[j];
    *reinterpret_cast<uint2*>(out + (share.begin + j) * kQuarter) = {pack<kNumber>(x.x * scale, x.y * scale),
                                                                     pack<kNumber>(x.z * scale, x.w * scale)};
  }
  if (share.begin > 0 || !(quarters & 1) || lane > 0) return;
  p.lse[p.offset(p.lse_strides, token, head)] = lse;
  if (p.max_logits) p.max_logits[p.offset(p.max_strides, token, head)] = max_logit_of(lse, combined.max_logit);
}

// Combines a token's partial results from the workspace. If they are few, their lse and max logits were loaded before:
// lane i passes those of split i.
__device__ __forceinline__ void combine_workspace_splits(const Partials& partials, int64_t first_partial, int splits,
                                                         int head, const Share& share, int lane, float early_lse,
                                                         float early_max_logit, CombinedRow& combined) {
  constexpr int kAtOnce = 2;
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) combined.values[j] = {};
  float max_lse = -INFINITY;
#pragma unroll 1
  for (int begin = 0; begin < splits; begin += 32) {
    float lse = early_lse, max_logit = early_max_logit;
    if (splits > kEarlySplits && begin + lane < splits) {
      const int64_t row = partials.row(first_partial + begin + lane, head);
      lse = __ldcg(partials.lse + row), max_logit = __ldcg(partials.max_logits + row);
    }
    // skip empty splits: there are many, as peers fill one slot together, and their rows may hold anything
    uint32_t filled = __ballot_sync(~0u, lse != -INFINITY);
    if (filled == 0) continue;
    combined.max_logit = fmaxf(combined.max_logit, max_of_warp(max_logit));
    const float raised = fmaxf(max_lse, max_of_warp(lse)), kept = expf(max_lse - raised);
    const float weight = combine_weight(lse, raised);
    combined.total = combined.total * kept + sum_of_warp(weight);
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j) {
      float4& x = combined.values[j];
      x = {x.x * kept, x.y * kept, x.z * kept, x.w * kept};
    }
    max_lse = raised;
#pragma unroll 1
    while (filled) {
      float4 x[kAtOnce][kShareQuarters];
      float weights[kAtOnce];
      int split = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        weights[i] = 0.0f;
        if (filled) {
          split = __ffs(filled) - 1;
          filled &= filled - 1;
          weights[i] = __shfl_sync(~0u, weight, split);
        }
        // past the last split, load that one again: under a condition the loads would wait for one another
        const float* from = partials.out + partials.row(first_partial + begin + split, head) * kValueDim +
                            share.begin * kQuarter + 4 * lane;
#pragma unroll
        for (int j = 0; j < kShareQuarters; ++j)
          if (share.begin + j < share.end) x[i][j] = __ldcg(reinterpret_cast<const float4*>(from + j * kQuarter));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int j = 0; j < kShareQuarters; ++j)
          if (weights[i] != 0.0f && share.begin + j < share.end) add_weighted(combined.values[j], weights[i], x[i][j]);
    }
  }
  if (max_lse > -INFINITY) combined.row_max = max_lse;
}

// Rows in peers' shared memory. Lane i has the address of peer i's.
template <int kQuartersOfWarp>
struct PeerRows {
  static constexpr int kAtOnce = 8 / kQuartersOfWarp;
  float4 x[kAtOnce][kQuartersOfWarp];

  // Issues the loads from peer `begin` on. Past the last peer it reads that one again.
  __device__ __forceinline__ void read(const ClusterPeers& peers, uint32_t row, int begin, int lane) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int member = min(begin + k, peers.count - 1);
      const uint32_t from = cute::set_block_rank(__shfl_sync(~0u, row, member) + 16 * lane, peers.first + member);
#pragma unroll
      for (int j = 0; j < kQuartersOfWarp; ++j) x[k][j] = load4_of_cta(from + j * kQuarter * 4);
    }
  }

  // Lane i has the weight of peer i. Every value is used, also one that does not count (it may be anything), so that
  // all loads have completed.
  __device__ __forceinline__ void add(const ClusterPeers& peers, float weight, int begin,
                                      float4 (&values)[kShareQuarters]) const {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float own = __shfl_sync(~0u, weight, min(begin + k, peers.count - 1));
      const bool counts = own != 0.0f && begin + k < peers.count;
#pragma unroll
      for (int j = 0; j < kQuartersOfWarp; ++j) {
        const float4& y = x[k][j];
        add_weighted(values[j], counts ? own : 0.0f,
                     {counts ? y.x : 0.0f, counts ? y.y : 0.0f, counts ? y.z : 0.0f, counts ? y.w : 0.0f});
      }
    }
  }
};

// Lane i's `row` is the address of the head's accumulators in peer i. All loads of a batch are issued before anything
// waits, because a read from another CTA has a high latency.
template <int kQuartersOfWarp>
__device__ __forceinline__ void combine_peer_rows(const SplitResult& result, uint32_t row, const ClusterPeers& peers,
                                                  const Share& share, int lane, CombinedRow& combined) {
  float4 theirs{-INFINITY, 0.0f, -INFINITY, 0.0f};
  if (lane < peers.count)
    theirs = load4_of_cta(cute::set_block_rank(cast_smem_ptr_to_uint(&result), peers.first + lane));
  row += share.begin * kQuarter * 4;
  PeerRows<kQuartersOfWarp> rows;
  rows.read(peers, row, 0, lane);
  __syncwarp();  // or the compiler delays some loads until others have completed
  const float raised = max_of_warp(theirs.x);
  const float weight = theirs.x == -INFINITY ? 0.0f : exp2_approximate(theirs.x - raised);
  combined.set(raised, sum_of_warp(weight * theirs.y), max_of_warp(theirs.z));
  rows.add(peers, weight, 0, combined.values);
#pragma unroll 1
  for (int begin = rows.kAtOnce; begin < peers.count; begin += rows.kAtOnce) {
    rows.read(peers, row, begin, lane);
    rows.add(peers, weight, begin, combined.values);
  }
  finish_reads();
}

// Combines the peers' splits. Without peers it takes the CTA's own split, wherever its accumulators are.
__device__ __forceinline__ void combine_peers(const SplitResult& result, uint32_t row, const ClusterPeers& peers,
                                              const Share& share, int lane, CombinedRow& combined) {
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) combined.values[j] = {};
  if (peers.count == 1) {
    if (result.row_max == -INFINITY) return;
    combined.set(result.row_max, result.total, result.max_score);
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j)
      combined.values[j] = load4(result.acc + 16 * lane + (share.begin + j) * kQuarter * 4);
    return;
  }
  if (share.end - share.begin == 1)
    combine_peer_rows<1>(result, row, peers, share, lane, combined);
  else
    combine_peer_rows<2>(result, row, peers, share, lane, combined);
}

// Eight warps combine a CTA's split of a token with the other splits. `results` has its statistics. Lane i's
// `row_of_head(head)` is the address of the head's accumulators in peer i, as an address in this CTA. Each warp calls
// `release` when it has read all that it needs from shared memory.
template <Number kNumber, int kHeads, typename Row, typename Read>
__device__ __forceinline__ void combine_splits(const AttentionProblem& p, const SplitResult (&results)[kHeads],
                                               int64_t token, const TokenSplit& split, const ClusterPeers& peers,
                                               int head_begin, int warp, int lane, Row row_of_head, Read release) {
  const Partials partials(p.workspace, p.ctas, p.heads);
  const int splits = static_cast<int>(min(max(int64_t{split.splits}, int64_t{1}), partials.count));
  const Share share = share_of(peers, warp, min(kHeads, p.heads - head_begin));
  const uint32_t quarters = (1u << (share.end - share.begin)) - 1;
  const bool complete = peers.count == splits;
  const int64_t partial = split.partial - peers.own;
#pragma unroll 1
  for (int own = share.head; own < share.heads; own += share.step) {
    const int head = head_begin + own;
    CombinedRow combined;
    combine_peers(results[own], row_of_head(own), peers, share, lane, combined);
    if (own + share.step >= share.heads) release();
    if (complete) {
      write_combined<kNumber>(p, token, head, share, quarters, lane, combined);
      continue;
    }
    const float scale = combined.scale(), lse = combined.lse();
    float* out = partials.out + partials.row(partial, head) * kValueDim + share.begin * kQuarter + 4 * lane;
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j) {
      if (share.begin + j >= share.end) continue;
      const float4 x = combined.values[j];
      *reinterpret_cast<float4*>(out + j * kQuarter) = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    }
    // all warps of a head write these (the same numbers), as none waits for another
    if (lane < peers.count) {
      const int64_t row = partials.row(partial + lane, head);
      partials.lse[row] = lane == 0 ? lse : -INFINITY;
      partials.max_logits[row] = lane == 0 ? max_logit_of(lse, combined.max_logit) : -INFINITY;
    }
  }
  if (share.head >= share.heads) release();
  if (complete) return;
  fence_of_gpu();
  __syncwarp();
  // each lane counts for one quarter of a head
  bool last = false;
  const int own_of_lane = share.head + lane / kQuarters * share.step, quarter_of_lane = share.begin + lane % kQuarters;
  if (own_of_lane < share.heads && quarter_of_lane < share.end) {
    int32_t* arrivals =
        p.arrivals + partials.row(split.first_partial, head_begin + own_of_lane) * kQuarters + quarter_of_lane;
    last = atomicAdd(arrivals, peers.count) + peers.count == splits;
    if (last) *arrivals = 0;
  }
  const uint32_t completed = __ballot_sync(~0u, last);
  if (completed == 0) return;
  fence_of_gpu();
  constexpr int kMostHeads = 4;  // per warp
  static_assert(kHeads * kQuarters <= kMostHeads * kShareQuarters * 8 && kMostHeads * kEarlySplits <= 32);
  float lses = -INFINITY, scores = -INFINITY;
  // only of complete heads: other splits may not be stored yet
  if (const int own = share.head + lane / kEarlySplits * share.step;
      splits <= kEarlySplits && own < share.heads && lane % kEarlySplits < splits &&
      (completed & 15u << lane / kEarlySplits * kQuarters)) {
    const int64_t row = partials.row(split.first_partial + lane % kEarlySplits, head_begin + own);
    lses = __ldcg(partials.lse + row), scores = __ldcg(partials.max_logits + row);
  }
#pragma unroll 1
  for (int i = 0; i < kMostHeads; ++i) {
    const uint32_t own_quarters = completed >> (i * kQuarters) & 15;
    if (own_quarters == 0) continue;
    const int head = head_begin + share.head + i * share.step;
    CombinedRow combined;
    const float lse = __shfl_sync(~0u, lses, i * kEarlySplits + lane % kEarlySplits);
    const float max_logit = __shfl_sync(~0u, scores, i * kEarlySplits + lane % kEarlySplits);
    const bool early = lane < kEarlySplits;
    combine_workspace_splits(partials, split.first_partial, splits, head, share, lane, early ? lse : -INFINITY,
                             early ? max_logit : -INFINITY, combined);
    write_combined<kNumber>(p, token, head, share, own_quarters, lane, combined);
  }
}

}  // namespace mla::cuda::sm90
