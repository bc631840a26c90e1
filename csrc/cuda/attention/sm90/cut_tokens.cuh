// The parts of a cut token become its results in the launch that computes them, in two steps.
//
//   in a cluster   workers whose whole work is a part of the same token read one another's results from shared memory;
//                  each merges some of the heads
//   in the grid    what that gives goes to the workspace, and whoever brings the last part of a quarter of a head's row
//                  merges the parts
//
// Nobody waits for a worker outside its cluster, as that one may not have begun. Parts are summed in their order, so
// the bits don't depend on who comes last.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/tile.h"
#include "cuda/attention/work.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/order.cuh"
#include "mla/number.h"
#include "mla/problem.h"

namespace mla::cuda::sm90 {

constexpr int kQuarters = Partials::kArrivalsPerRow;
constexpr int kQuarter = kValueDim / kQuarters;  // four numbers a lane
constexpr int kShareQuarters = 2;                // that a warp has of a row at most
static_assert(kQuarter == 4 * 32);

// The workers of a cluster that have parts of one token and nothing else, from rank `first` on; this one is the
// `own`th.
struct Team {
  int first, count, own;

  // A warp says something at all the team's barriers. Each of these expects to hear it from all blocks of the cluster,
  // and hears it from this one for those that are not in the team.
  __device__ void arrive(Barrier& barrier, int lane) const {
    if (lane < count) arrive_in_block(cute::set_block_rank(cast_smem_ptr_to_uint(&barrier), first + lane), 1);
    const int others = static_cast<int>(blocks_of_cluster()) - count;
    if (lane == 0 && others > 0)
      arrive_in_block(cute::set_block_rank(cast_smem_ptr_to_uint(&barrier), first + own), others);
  }
};

// What the plan says of other workers that a worker has to do with. Asked for when it begins: it takes long to come.
struct Neighbours {
  PlanRow row;  // of the block of lane i's rank in the cluster
  int parts;    // of the token that the worker continues

  __device__ Neighbours(const Worker& worker, int lane)
      : row(Worker::row_of(worker.p, index_of(worker, lane))), parts(worker.p.plan[worker.owner()].parts) {}

  static __device__ int index_of(const Worker& worker, int lane) {
    const int size = blocks_of_cluster();
    return lane < size ? worker.index - static_cast<int>(rank_in_cluster()) + lane : worker.p.workers;
  }
};

// `tiles` becomes how many tiles the block of this lane's rank has, if its whole work is a part of a token.
__device__ __forceinline__ Team find_team(const Worker& worker, const Neighbours& neighbours, int max_granule, int lane,
                                          int& tiles) {
  const int size = blocks_of_cluster();
  const int rank = rank_in_cluster();
  Team team{rank, 1, 0};
  tiles = 0;
  if (size == 1) return team;
  const Worker other(worker.p, Neighbours::index_of(worker, lane), neighbours.row, max_granule);
  bool single = other.token_end - other.token_begin == 1;
  if (single) {
    const TokenWork work = other.work(other.token_begin);
    single = !work.whole();
    tiles = work.tile_end - work.tile_begin;
  }
  const int token = single ? other.token_begin : -1, own_token = __shfl_sync(~0u, token, rank);
  const uint32_t same = __ballot_sync(~0u, single && token == own_token);
  if (!(same >> rank & 1)) return team;
  const int first = __ffs(same) - 1, count = __popc(same);
  if (same >> first != (1u << count) - 1) return team;  // no plan of ours
  team.first = first;
  team.count = count;
  team.own = rank - team.first;
  return team;
}

constexpr int kMostBlocks = 16;  // of a cluster

// What a worker's cut tokens are parts of. One warp notes it when it begins, so that no register has to keep it.
struct Joints {
  Team team;
  TokenPart parts[2];      // of the token that is left open, and of the one that is continued
  int tiles[kMostBlocks];  // of each of the team's blocks, by their rank

  __device__ void note(const Worker& worker, const Neighbours& neighbours, int max_granule, int lane) {
    int own_tiles;
    const Team found = find_team(worker, neighbours, max_granule, lane, own_tiles);
    if (lane < kMostBlocks) tiles[lane] = own_tiles;
    if (lane > 0) return;
    team = found;
    parts[0] = worker.opened_part(), parts[1] = worker.continued_part(neighbours.parts);
  }
};

// What a block found for its part of a token, for the others to read.
struct alignas(16) PartResult {
  float reference;  // of what follows, to base 2; -inf if there is nothing to attend to
  float total;      // of 2^(score - reference)
  float largest;    // score, to base 2
  uint32_t sums;    // shared address of the head's 512 sums
};

__device__ __forceinline__ float max_of_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

__device__ __forceinline__ void add_weighted(float4& sum, float weight, float4 x) {
  sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}

// A head's row is merged by two warps or by four: quarters of it, in which a lane has four numbers.
struct MergedRow {
  float4 values[kShareQuarters];  // times `total`, before they are results
  float reference = 0.0f, total = 0.0f;
  float largest = -INFINITY;  // score

  // From base 2, if anything was.
  __device__ void found(float reference2, float total_found, float largest2) {
    if (reference2 == -INFINITY) return;
    reference = reference2 * kLn2, total = total_found, largest = largest2 * kLn2;
  }
  __device__ float lse() const { return total == 0.0f ? -INFINITY : reference + logf(total); }
  __device__ float scale() const { return total == 0.0f ? 0.0f : 1.0f / total; }
};

// The quarters of head rows that a warp has, [begin, end) of each.
struct Share {
  int head, step, heads;  // heads `head`, `head + step`, ... of the block's
  int begin, end;
};

__device__ __forceinline__ Share share_of(const Team& team, int warp, int heads) {
  if (team.count <= 4)
    return {team.own + team.count * (warp / 2), 4 * team.count, heads, warp % 2 * 2, warp % 2 * 2 + 2};
  return {team.own + team.count * (warp / 4), 2 * team.count, heads, warp % 4, warp % 4 + 1};
}

__device__ __forceinline__ void write_merged(const AttentionProblem& p, int64_t token, int head, const Share& share,
                                             uint32_t quarters, int lane, const MergedRow& merged) {
  const float lse = merged.lse();
  float scale = merged.scale();
  if (p.sink && lse > -INFINITY) scale /= 1.0f + expf(p.sink[head] - lse);
  uint16_t* out = p.out + token * p.out_token + head * p.out_head + 4 * lane;
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) {
    if (!(quarters >> j & 1)) continue;
    const float4 x = merged.values[j];
    *reinterpret_cast<uint2*>(out + (share.begin + j) * kQuarter) = {pack_bf16(x.x * scale, x.y * scale),
                                                                     pack_bf16(x.z * scale, x.w * scale)};
  }
  if (share.begin > 0 || !(quarters & 1) || lane > 0) return;
  p.lse[token * p.lse_token + head * p.lse_head] = lse;
  if (p.max_logits) p.max_logits[token * p.max_token + head * p.max_head] = isnan(lse) ? lse : merged.largest;
}

constexpr int kEarlyParts = 8;

// Merges what the workspace holds of a token. Its lse and scores have been loaded already if the parts are few.
__device__ __forceinline__ void merge_places(const Partials& partials, int64_t first_place, int parts, int head,
                                             const Share& share, int lane, float early_lse, float early_largest,
                                             MergedRow& merged) {
  constexpr int kAtOnce = 2;
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) merged.values[j] = {};
  float reference = -INFINITY;
#pragma unroll 1
  for (int begin = 0; begin < parts; begin += 32) {
    float lse = early_lse, largest = early_largest;
    if (parts > kEarlyParts && begin + lane < parts) {
      const int64_t row = partials.row(first_place + begin + lane, head);
      lse = __ldcg(partials.lse + row), largest = __ldcg(partials.max_logits + row);
    }
    // an empty part may hold anything, and many are: a team fills one place
    uint32_t filled = __ballot_sync(~0u, lse != -INFINITY);
    if (filled == 0) continue;
    merged.largest = fmaxf(merged.largest, max_of_warp(largest));
    const float raised = fmaxf(reference, max_of_warp(lse)), kept = expf(reference - raised);
    const float weight = lse == -INFINITY ? 0.0f : expf(lse - raised);
    merged.total = merged.total * kept + sum_of_warp(weight);
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j) {
      float4& x = merged.values[j];
      x = {x.x * kept, x.y * kept, x.z * kept, x.w * kept};
    }
    reference = raised;
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
        const float* from = partials.out + partials.row(first_place + begin + part, head) * kValueDim +
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
  if (reference > -INFINITY) merged.reference = reference;
}

// Rows in the team's blocks: lane i knows where that of block i is.
template <int kQuartersOfWarp>
struct TeamRows {
  static constexpr int kAtOnce = 8 / kQuartersOfWarp;
  float4 x[kAtOnce][kQuartersOfWarp];

  // Those of block `begin` on; after the last one that one again.
  __device__ __forceinline__ void read(const Team& team, uint32_t row, int begin, int lane) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int member = min(begin + k, team.count - 1);
      const uint32_t from = cute::set_block_rank(__shfl_sync(~0u, row, member) + 16 * lane, team.first + member);
#pragma unroll
      for (int j = 0; j < kQuartersOfWarp; ++j) x[k][j] = load4_of_block(from + j * kQuarter * 4);
    }
  }

  // `weight` is lane i's for block i. Every number is looked at, also of those that don't count, which may be anything:
  // so all have arrived.
  __device__ __forceinline__ void add(const Team& team, float weight, int begin,
                                      float4 (&values)[kShareQuarters]) const {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float own = __shfl_sync(~0u, weight, min(begin + k, team.count - 1));
      const bool counts = own != 0.0f && begin + k < team.count;
#pragma unroll
      for (int j = 0; j < kQuartersOfWarp; ++j) {
        const float4& y = x[k][j];
        add_weighted(values[j], counts ? own : 0.0f,
                     {counts ? y.x : 0.0f, counts ? y.y : 0.0f, counts ? y.z : 0.0f, counts ? y.w : 0.0f});
      }
    }
  }
};

// `row` is where the head's sums are in the block of lane i's rank of the team. All of a batch is asked for before
// anything waits: a read of another block takes long, however many there are.
template <int kQuartersOfWarp>
__device__ __forceinline__ void merge_rows_of_team(const PartResult& result, uint32_t row, const Team& team,
                                                   const Share& share, int lane, MergedRow& merged) {
  float4 theirs{-INFINITY, 0.0f, -INFINITY, 0.0f};
  if (lane < team.count)
    theirs = load4_of_block(cute::set_block_rank(cast_smem_ptr_to_uint(&result), team.first + lane));
  row += share.begin * kQuarter * 4;
  TeamRows<kQuartersOfWarp> rows;
  rows.read(team, row, 0, lane);
  __syncwarp();  // or the compiler asks for some of them when the others are there
  const float raised = max_of_warp(theirs.x);
  const float weight = theirs.x == -INFINITY ? 0.0f : exp2_approximate(theirs.x - raised);
  merged.found(raised, sum_of_warp(weight * theirs.y), max_of_warp(theirs.z));
  rows.add(team, weight, 0, merged.values);
#pragma unroll 1
  for (int begin = rows.kAtOnce; begin < team.count; begin += rows.kAtOnce) {
    rows.read(team, row, begin, lane);
    rows.add(team, weight, begin, merged.values);
  }
  finish_reads();
}

// Merges what the team's blocks hold. Alone in a team, it is what the block itself holds, wherever that is.
__device__ __forceinline__ void merge_team(const PartResult& result, uint32_t row, const Team& team, const Share& share,
                                           int lane, MergedRow& merged) {
#pragma unroll
  for (int j = 0; j < kShareQuarters; ++j) merged.values[j] = {};
  if (team.count == 1) {
    if (result.reference == -INFINITY) return;
    merged.found(result.reference, result.total, result.largest);
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j)
      merged.values[j] = load4(result.sums + 16 * lane + (share.begin + j) * kQuarter * 4);
    return;
  }
  if (share.end - share.begin == 1)
    merge_rows_of_team<1>(result, row, team, share, lane, merged);
  else
    merge_rows_of_team<2>(result, row, team, share, lane, merged);
}

// Eight warps bring a worker's part of a token, which `results` describes, together with the others.
// `row_of_head(head)` is where a head's sums are in the block of lane i's rank of the team, as an address of this
// block. Each warp calls `have_read` when it needs nothing in shared memory any more.
template <int kHeads, typename Row, typename Read>
__device__ __forceinline__ void join_parts(const AttentionProblem& p, const PartResult (&results)[kHeads],
                                           int64_t token, const TokenPart& part, const Team& team, int head_begin,
                                           int warp, int lane, Row row_of_head, Read have_read) {
  const Partials partials(p.workspace, p.workers, p.heads);
  const int parts = static_cast<int>(min(max(int64_t{part.parts}, int64_t{1}), partials.places));
  const Share share = share_of(team, warp, min(kHeads, p.heads - head_begin));
  const uint32_t quarters = (1u << (share.end - share.begin)) - 1;
  const bool complete = team.count == parts;
  const int64_t place = part.place - team.own;
#pragma unroll 1
  for (int own = share.head; own < share.heads; own += share.step) {
    const int head = head_begin + own;
    MergedRow merged;
    merge_team(results[own], row_of_head(own), team, share, lane, merged);
    if (own + share.step >= share.heads) have_read();
    if (complete) {
      write_merged(p, token, head, share, quarters, lane, merged);
      continue;
    }
    const float scale = merged.scale(), lse = merged.lse();
    float* out = partials.out + partials.row(place, head) * kValueDim + share.begin * kQuarter + 4 * lane;
#pragma unroll
    for (int j = 0; j < kShareQuarters; ++j) {
      if (share.begin + j >= share.end) continue;
      const float4 x = merged.values[j];
      *reinterpret_cast<float4*>(out + j * kQuarter) = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    }
    // each of a head's warps writes these, as none waits for another
    if (lane < team.count) {
      const int64_t row = partials.row(place + lane, head);
      partials.lse[row] = lane == 0 ? lse : -INFINITY;
      partials.max_logits[row] = lane == 0 ? (isnan(lse) ? lse : merged.largest) : -INFINITY;
    }
  }
  if (share.head >= share.heads) have_read();
  if (complete) return;
  fence_of_gpu();
  __syncwarp();
  // a lane a quarter of a head
  bool last = false;
  const int own_of_lane = share.head + lane / kQuarters * share.step, quarter_of_lane = share.begin + lane % kQuarters;
  if (own_of_lane < share.heads && quarter_of_lane < share.end) {
    int32_t* arrivals =
        p.arrivals + partials.row(part.first_place, head_begin + own_of_lane) * kQuarters + quarter_of_lane;
    last = atomicAdd(arrivals, team.count) + team.count == parts;
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
    const int64_t row = partials.row(part.first_place + lane % kEarlyParts, head_begin + own);
    lses = __ldcg(partials.lse + row), scores = __ldcg(partials.max_logits + row);
  }
#pragma unroll 1
  for (int i = 0; i < kMostHeads; ++i) {
    const uint32_t own_quarters = completed >> (i * kQuarters) & 15;
    if (own_quarters == 0) continue;
    const int head = head_begin + share.head + i * share.step;
    MergedRow merged;
    const float lse = __shfl_sync(~0u, lses, i * kEarlyParts + lane % kEarlyParts);
    const float largest = __shfl_sync(~0u, scores, i * kEarlyParts + lane % kEarlyParts);
    const bool early = lane < kEarlyParts;
    merge_places(partials, part.first_place, parts, head, share, lane, early ? lse : -INFINITY,
                 early ? largest : -INFINITY, merged);
    write_merged(p, token, head, share, own_quarters, lane, merged);
  }
}

}  // namespace mla::cuda::sm90
