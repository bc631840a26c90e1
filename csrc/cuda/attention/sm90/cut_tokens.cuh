// Merges the parts of split tokens in the launch that computes them, in two steps.
//
//   in a cluster   workers whose whole work is a part of the same token read one another's results from shared memory;
//                  each merges some of the heads
//   in the grid    what that gives goes to the workspace, and whoever stores the last part of a quarter of a head's row
//                  merges the parts
//
// Nobody waits for a worker outside its cluster: that one may not have begun. Parts are summed in their order, so the
// bits don't depend on which comes last.
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
constexpr int kQuarter = kValueDim / kQuarters;  // four numbers a lane
constexpr int kShareQuarters = 2;                // that a warp has of a row at most
static_assert(kQuarter == 4 * 32);

// The blocks of this block's cluster that work on parts of one token and on nothing else: `count` of them from rank
// `first` on. This block is the `own`th.
struct ClusterPeers {
  int first, count, own;

  // A warp arrives at the barrier of every peer, after all that its lanes have done. A barrier expects all blocks of
  // the cluster, so each block also arrives at its own for those that are no peers.
  __device__ void arrive(Barrier& barrier, int lane) const {
    __syncwarp();
    if (lane < count) arrive_in_block(cute::set_block_rank(cast_smem_ptr_to_uint(&barrier), first + lane), 1);
    const int others = static_cast<int>(blocks_of_cluster()) - count;
    if (lane == 0 && others > 0)
      arrive_in_block(cute::set_block_rank(cast_smem_ptr_to_uint(&barrier), first + own), others);
  }
};

// The plan's rows of the workers that this one depends on. Loaded at once when the kernel begins, as latency is high.
struct Neighbours {
  PlanRow row;  // of the block of lane i's rank in the cluster
  int parts;    // of the token that the worker continues

  __device__ void load(const Worker& worker, int lane) {
    row = Worker::row_of(worker.p, index_of(worker, lane));
    parts = worker.p.plan[worker.owner()].parts;
  }

  static __device__ int index_of(const Worker& worker, int lane) {
    const int size = blocks_of_cluster();
    return lane < size ? worker.index - static_cast<int>(rank_in_cluster()) + lane : worker.p.workers;
  }
};

// `tiles` becomes the number of tiles of the block of this lane's rank, if its whole work is a part of one token.
__device__ __forceinline__ ClusterPeers find_peers(const Worker& worker, const Neighbours& neighbours,
                                                   int max_tile_slots, int lane, int& tiles) {
  const int size = blocks_of_cluster();
  const int rank = rank_in_cluster();
  ClusterPeers peers{rank, 1, 0};
  tiles = 0;
  if (size == 1) return peers;
  const Worker other(worker.p, Neighbours::index_of(worker, lane), neighbours.row, max_tile_slots);
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
  if (same >> first != (1u << count) - 1) return peers;  // a caller's plan, whose parts are not neighbours
  peers.first = first;
  peers.count = count;
  peers.own = rank - peers.first;
  return peers;
}

constexpr int kMostBlocks = 16;  // of a cluster

// Which parts a worker has of the tokens that it shares with others. One warp stores it when the kernel begins, to save
// registers.
struct CutTokens {
  ClusterPeers peers;
  TokenPart parts[2];      // of the token that is left open, and of the one that is continued
  int tiles[kMostBlocks];  // of each block of the cluster, by rank

  __device__ void store(const Worker& worker, const Neighbours& neighbours, int max_tile_slots, int lane) {
    int own_tiles;
    const ClusterPeers found = find_peers(worker, neighbours, max_tile_slots, lane, own_tiles);
    if (lane < kMostBlocks) tiles[lane] = own_tiles;
    if (lane > 0) return;
    peers = found;
    parts[0] = worker.opened_part(), parts[1] = worker.continued_part(neighbours.parts);
  }
};

// A block's softmax statistics of its part of a token, for its peers to read.
struct alignas(16) PartResult {
  float row_max;    // of what follows, to base 2; -inf if there is nothing to attend to
  float total;      // of 2^(score - reference)
  float max_score;  // to base 2
  uint32_t acc;     // shared address of the head's 512 sums
};

__device__ __forceinline__ void add_weighted(float4& acc, float weight, float4 x) {
  acc.x += weight * x.x, acc.y += weight * x.y, acc.z += weight * x.z, acc.w += weight * x.w;
}

// A head's row is merged by two warps or by four: quarters of it, in which a lane has four numbers.
struct MergedRow {
  float4 values[kShareQuarters];  // times `total`, before they are results
  float row_max = 0.0f, total = 0.0f;
  float max_logit = -INFINITY;  // natural, as in the result

  // Converts statistics to base 2; nothing to do if the parts were empty.
  __device__ void set(float row_max2, float new_total, float max_score) {
    if (row_max2 == -INFINITY) return;
    row_max = row_max2 * kLn2, total = new_total, max_logit = max_score * kLn2;
  }
  __device__ HeadResult result() const { return finish_softmax(row_max, total, max_logit); }
};

// The quarters of head rows that a warp has, [begin, end) of each.
struct Share {
  int head, step, heads;  // heads `head`, `head + step`, ... of the block's
  int begin, end;
};

__device__ __forceinline__ Share share_of(const ClusterPeers& peers, int warp, int heads) {
  if (peers.count <= 4)
    return {peers.own + peers.count * (warp / 2), 4 * peers.count, heads, warp % 2 * 2, warp % 2 * 2 + 2};
  return {peers.own + peers.count * (warp / 4), 2 * peers.count, heads, warp % 4, warp % 4 + 1};
}

template <Number kNumber>
__device__ __forceinline__ void write_merged(const AttentionProblem& p, int64_t token, int head, const Share& share,
                                             uint32_t quarters, int lane, const MergedRow& merged) {
  const auto [lse, factor, max_logit] = merged.result();
  const float scale = with_sink(factor * p.value_scale, p, head, lse);
  uint16_t* out = p.out + p.offset(p.out_strides, token, head) + 4 * lane;
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) {
    if (!(quarters >> j & 1)) continue;
    const float4 x = merged.values[j];
    *reinterpret_cast<uint2*>(out + (share.begin + j) * kQuarter) = {pack<kNumber>(x.x * scale, x.y * scale),
                                                                     pack<kNumber>(x.z * scale, x.w * scale)};
  }
  if (share.begin > 0 || !(quarters & 1) || lane > 0) return;
  write_statistics(p, token, head, lse, max_logit);
}

constexpr int kEarlyParts = 8;

// Merges the parts that the workspace holds of a token. If they are few, their lse and max logits have been loaded
// already.
__device__ __forceinline__ void merge_workspace_parts(const Partials& partials, int64_t first_partial, int parts,
                                                      int head, const Share& share, int lane, float early_lse,
                                                      float early_max_logit, MergedRow& merged) {
  constexpr int kAtOnce = 2;
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) merged.values[j] = {};
  float max_lse = -INFINITY;
#pragma unroll 1
  for (int begin = 0; begin < parts; begin += 32) {
    float lse = early_lse, max_logit = early_max_logit;
    if (parts > kEarlyParts && begin + lane < parts) {
      const int64_t row = partials.row(first_partial + begin + lane, head);
      lse = __ldcg(partials.lse + row), max_logit = __ldcg(partials.max_logits + row);
    }
    // an empty part may hold anything, and many are empty: peers fill one slot together
    uint32_t filled = __ballot_sync(~0u, lse != -INFINITY);
    if (filled == 0) continue;
    merged.max_logit = fmaxf(merged.max_logit, max_of_warp(max_logit));
    const float raised = fmaxf(max_lse, max_of_warp(lse)), kept = expf(max_lse - raised);
    const float weight = combine_weight(lse, raised);
    merged.total = merged.total * kept + sum_of_warp(weight);
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j) {
      float4& x = merged.values[j];
      x = {x.x * kept, x.y * kept, x.z * kept, x.w * kept};
    }
    max_lse = raised;
#pragma unroll 1
    while (filled) {
      float4 x[kAtOnce][kShareQuarters];
      float weights[kAtOnce];
      int part = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        weights[i] = 0.0f;
        if (filled) {
          part = __ffs(filled) - 1;
          filled &= filled - 1;
          weights[i] = __shfl_sync(~0u, weight, part);
        }
        // after the last part that one again: with a condition the loads would wait for one another
        const float* from = partials.out + partials.row(first_partial + begin + part, head) * kValueDim +
                            share.begin * kQuarter + 4 * lane;
#pragma unroll
        for (int j = 0; j < kShareQuarters; ++j)
          if (share.begin + j < share.end) x[i][j] = __ldcg(reinterpret_cast<const float4*>(from + j * kQuarter));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int j = 0; j < kShareQuarters; ++j)
          if (weights[i] != 0.0f && share.begin + j < share.end) add_weighted(merged.values[j], weights[i], x[i][j]);
    }
  }
  if (max_lse > -INFINITY) merged.row_max = max_lse;
}

// Rows in peers' shared memory: lane i knows the address of peer i's.
template <int kQuartersOfWarp>
struct PeerRows {
  static constexpr int kAtOnce = 8 / kQuartersOfWarp;
  float4 x[kAtOnce][kQuartersOfWarp];

  // From peer `begin` on. Past the last one it reads that one again.
  __device__ __forceinline__ void read(const ClusterPeers& peers, uint32_t row, int begin, int lane) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int member = min(begin + k, peers.count - 1);
      const uint32_t from = cute::set_block_rank(__shfl_sync(~0u, row, member) + 16 * lane, peers.first + member);
#pragma unroll
      for (int j = 0; j < kQuartersOfWarp; ++j) x[k][j] = load4_of_block(from + j * kQuarter * 4);
    }
  }

  // Lane i has the weight of peer i. Every value is looked at, even one that does not count and may be anything: so all
  // have arrived.
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

// Lane i's `row` is the address of the head's sums in peer i. A batch is loaded before anything waits: a read from
// another block takes long, however many there are.
template <int kQuartersOfWarp>
__device__ __forceinline__ void merge_peer_rows(const PartResult& result, uint32_t row, const ClusterPeers& peers,
                                                const Share& share, int lane, MergedRow& merged) {
  float4 theirs{-INFINITY, 0.0f, -INFINITY, 0.0f};
  if (lane < peers.count)
    theirs = load4_of_block(cute::set_block_rank(cast_smem_ptr_to_uint(&result), peers.first + lane));
  row += share.begin * kQuarter * 4;
  PeerRows<kQuartersOfWarp> rows;
  rows.read(peers, row, 0, lane);
  __syncwarp();  // or the compiler delays some loads until others have arrived
  const float raised = max_of_warp(theirs.x);
  const float weight = theirs.x == -INFINITY ? 0.0f : exp2_approximate(theirs.x - raised);
  merged.set(raised, sum_of_warp(weight * theirs.y), max_of_warp(theirs.z));
  rows.add(peers, weight, 0, merged.values);
#pragma unroll 1
  for (int begin = rows.kAtOnce; begin < peers.count; begin += rows.kAtOnce) {
    rows.read(peers, row, begin, lane);
    rows.add(peers, weight, begin, merged.values);
  }
  finish_reads();
}

// Merges the peers' parts. Without peers it is the block's own part, wherever its sums are.
__device__ __forceinline__ void merge_peers(const PartResult& result, uint32_t row, const ClusterPeers& peers,
                                            const Share& share, int lane, MergedRow& merged) {
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) merged.values[j] = {};
  if (peers.count == 1) {
    if (result.row_max == -INFINITY) return;
    merged.set(result.row_max, result.total, result.max_score);
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j)
      merged.values[j] = load4(result.acc + 16 * lane + (share.begin + j) * kQuarter * 4);
    return;
  }
  if (share.end - share.begin == 1)
    merge_peer_rows<1>(result, row, peers, share, lane, merged);
  else
    merge_peer_rows<2>(result, row, peers, share, lane, merged);
}

// Eight warps merge a worker's part of a token with the other parts. `results` has its statistics; lane i's
// `row_of_head(head)` is where peer i has the head's sums, as an address in this block. Each warp calls `release` when
// it has read all that it needs from shared memory.
template <Number kNumber, int kHeads, typename Row, typename Read>
__device__ __forceinline__ void merge_parts(const AttentionProblem& p, const PartResult (&results)[kHeads],
                                            int64_t token, const TokenPart& part, const ClusterPeers& peers,
                                            int head_begin, int warp, int lane, Row row_of_head, Read release) {
  const Partials partials(p.workspace, p.workers, p.heads);
  const int parts = static_cast<int>(min(max(int64_t{part.parts}, int64_t{1}), partials.count));
  const Share share = share_of(peers, warp, min(kHeads, p.heads - head_begin));
  const uint32_t quarters = (1u << (share.end - share.begin)) - 1;
  const bool complete = peers.count == parts;
  const int64_t partial = part.partial - peers.own;
#pragma unroll 1
  for (int own = share.head; own < share.heads; own += share.step) {
    const int head = head_begin + own;
    MergedRow merged;
    merge_peers(results[own], row_of_head(own), peers, share, lane, merged);
    if (own + share.step >= share.heads) release();
    if (complete) {
      write_merged<kNumber>(p, token, head, share, quarters, lane, merged);
      continue;
    }
    const auto [lse, scale, max_logit] = merged.result();
    float* out = partials.out + partials.row(partial, head) * kValueDim + share.begin * kQuarter + 4 * lane;
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j) {
      if (share.begin + j >= share.end) continue;
      const float4 x = merged.values[j];
      *reinterpret_cast<float4*>(out + j * kQuarter) = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    }
    // each of a head's warps writes these, as none waits for another
    if (lane < peers.count) {
      const int64_t row = partials.row(partial + lane, head);
      partials.lse[row] = lane == 0 ? lse : -INFINITY;
      partials.max_logits[row] = lane == 0 ? max_logit : -INFINITY;
    }
  }
  if (share.head >= share.heads) release();
  if (complete) return;
  fence_of_gpu();
  __syncwarp();
  // a lane a quarter of a head
  bool last = false;
  const int own_of_lane = share.head + lane / kQuarters * share.step, quarter_of_lane = share.begin + lane % kQuarters;
  if (own_of_lane < share.heads && quarter_of_lane < share.end) {
    int32_t* arrivals =
        p.arrivals + partials.row(part.first_partial, head_begin + own_of_lane) * kQuarters + quarter_of_lane;
    last = atomicAdd(arrivals, peers.count) + peers.count == parts;
    if (last) *arrivals = 0;
  }
  const uint32_t completed = __ballot_sync(~0u, last);
  if (completed == 0) return;
  fence_of_gpu();
  constexpr int kMostHeads = 4;  // of a warp
  static_assert(kHeads * kQuarters <= kMostHeads * kShareQuarters * 8 && kMostHeads * kEarlyParts <= 32);
  float lses = -INFINITY, scores = -INFINITY;
  // parts of heads that are not complete may not be there yet
  if (const int own = share.head + lane / kEarlyParts * share.step;
      parts <= kEarlyParts && own < share.heads && lane % kEarlyParts < parts &&
      (completed & 15u << lane / kEarlyParts * kQuarters)) {
    const int64_t row = partials.row(part.first_partial + lane % kEarlyParts, head_begin + own);
    lses = __ldcg(partials.lse + row), scores = __ldcg(partials.max_logits + row);
  }
#pragma unroll 1
  for (int i = 0; i < kMostHeads; ++i) {
    const uint32_t own_quarters = completed >> (i * kQuarters) & 15;
    if (own_quarters == 0) continue;
    const int head = head_begin + share.head + i * share.step;
    MergedRow merged;
    const float lse = __shfl_sync(~0u, lses, i * kEarlyParts + lane % kEarlyParts);
    const float max_logit = __shfl_sync(~0u, scores, i * kEarlyParts + lane % kEarlyParts);
    const bool early = lane < kEarlyParts;
    merge_workspace_parts(partials, part.first_partial, parts, head, share, lane, early ? lse : -INFINITY,
                          early ? max_logit : -INFINITY, merged);
    write_merged<kNumber>(p, token, head, share, own_quarters, lane, merged);
  }
}

}  // namespace mla::cuda::sm90
