// Sparse attention for up to 16 heads on Hopper, and for up to 32 with fp8 rows. Tokens are the 64 rows of wgmma and
// heads its columns, so that few heads fill the instruction:
//
//   scores  S^T [64 tokens x heads] = K [64 x 576] Q^T
//   values  O^T [512 dims x heads] += V^T [512 x 64] P^T
//
// Two warpgroups take turns at tiles and do all that there is to do with one; each keeps a softmax and sums of its own,
// so they never wait for one another before the end of a token, where their results are merged in the place of its last
// tile. What other workers found for the token joins them there (cut_tokens.cuh). Eight warps bring rows. How these lie
// and are multiplied is a matter of the cache's format: code_rows.cuh, bf16_rows.cuh.
//
//   bring    | rows of i + 4 ...
//   group 0  | scores i, softmax i, values i | scores i + 2, ...
//   group 1           | scores i + 1, softmax i + 1, values i + 1 | ...
//
// A tile costs a warpgroup one barrier: weights are computed with the running maximum as it is, stored, and the barrier
// tells whether any warp has seen a score that is larger by a factor of more than 2^8. Only then are maxima exchanged,
// sums rescaled and weights computed once more. The result is exact either way; 2^8 is what f16 weights have to spare.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "cuda/attention/sm90/few_heads/config.h"
#include "cuda/attention/sm90/results.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::few_heads {

// Named barriers of the consumer warpgroups: 1 and 2, and one for both.
constexpr int kGroupThreads = 128;
__device__ __forceinline__ int group_barrier(int group) { return 1 + group; }
constexpr int kBothGroups = 3;

// kLargest: the largest scores are asked for.
template <Code kCode, int kHeads, bool kLargest>
struct Consumer {
  using Memory = Shared<kCode, kHeads>;
  using Rows = RowsOf<kCode, kHeads>;
  static constexpr int kSums = kHeads / 2;     // a lane's numbers of 64 rows
  static constexpr int kColumns = kHeads / 4;  // a lane's heads
  // Results meet in rounds of so many heads.
  static constexpr int kRounds = kHeads / kMeetingHeads<kHeads>, kRoundColumns = kColumns / kRounds;

  const AttentionProblem& p;
  Memory& s;
  const int head_begin;
  const int group, warp, lane;  // warp of the warpgroup
  Rows rows;
  uint32_t weights_place;  // this lane's, of its warpgroup's weights

  float out[kLatentBlocks][kSums];  // O^T
  float reference[kColumns];        // weights are 2^(score - reference)
  float total[kColumns];            // of the lane's rows
  float highest[kLargest ? kColumns : 1];
  float score[kSums];
#ifdef MLA_RACECHECK
  uint32_t meetings = 0;
#endif

  static __device__ constexpr int column(int i) { return i / 4 * 2 + i % 2; }
  static __device__ constexpr int half(int i) { return i / 2 % 2; }  // row lane / 4, or that plus 8
  __device__ int head(int column) const { return column / 2 * 8 + lane % 4 * 2 + column % 2; }

  // A lane names the row (head) of one of the 8 x 8 blocks: eight tokens, that is one piece, of eight heads. The
  // compiler is not to share it with what wgmma is told, which has to be the same for all lanes.
  __device__ void find_weights_place() {
    const int own_head = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    weights_place = cast_smem_ptr_to_uint(s.weights[group]) + own_head * kRowBytes + (piece ^ lane % 8) * kPieceBytes;
    hide(weights_place);
  }

  __device__ void start_token() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      reference[c] = kLowest;
      if constexpr (kLargest) highest[c] = kLowest;
      total[c] = 0.0f;
    }
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kSums; ++i) out[b][i] = 0.0f;
  }

  // Stores weights for the reference as it is.
  __device__ void store_weights(float (&weight)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) weight[i] = exp2_approximate(score[i] - reference[column(i)]);
    constexpr int kPairs = kRoundColumns;  // of 8 or 16 heads
#pragma unroll
    for (int first = 0; first < kSums / 2; first += kPairs) {
      uint32_t pairs[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        pairs[i] = rows.pack(weight[2 * (first + i)], weight[2 * (first + i) + 1], half(2 * i));
      store_tiles_transposed(weights_place + first / kPairs * kMeetingHeads<kHeads> * kRowBytes, pairs);
    }
  }

  // A warpgroup's first tile of a token raises the reference from nothing, so it is not asked whether it would.
  __device__ void softmax(bool first) {
    float weight[kSums];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if constexpr (kLargest) highest[column(i)] = fmaxf(highest[column(i)], score[i]);
      grows |= score[i] + rows.lift(half(i)) > reference[column(i)] + kSlack;
    }
    if (!first) {
      store_weights(weight);
      publish_to_wgmma();
    }
    if (first || sync_named_or<kGroupThreads>(group_barrier(group), grows)) {
      raise_reference();
      store_weights(weight);
      publish_to_wgmma();
      sync_named<kGroupThreads>(group_barrier(group));
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[column(i)] += weight[i];
  }

  __device__ void raise_reference() {
    float top[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = c / 2 * 4 + c % 2;
      top[c] = fmaxf(score[i] + rows.lift(0), score[i + 2] + rows.lift(1));
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], distance));
      if (lane < 4) s.largest[group][warp][head(c)] = top[c];
    }
    sync_named<kGroupThreads>(group_barrier(group));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float raised = reference[c];
#pragma unroll
      for (int w = 0; w < 4; ++w) raised = fmaxf(raised, s.largest[group][w][head(c)]);
      const float rescale = exp2_approximate(reference[c] - raised);
      reference[c] = raised;
      total[c] *= rescale;
#pragma unroll
      for (int b = 0; b < kLatentBlocks; ++b) {
        out[b][c / 2 * 4 + c % 2] *= rescale;
        out[b][c / 2 * 4 + c % 2 + 2] *= rescale;
      }
    }
  }

  // What the warpgroup found, but for its output, to where the other one sees it, when what it found two turns ago has
  // been collected. `turn` is the number of the turn's first round.
  __device__ void leave_sums(uint32_t turn) {
    const int slot = turn / kRounds % 2;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        total[c] += __shfl_xor_sync(~0u, total[c], distance);
        if constexpr (kLargest) highest[c] = fmaxf(highest[c], __shfl_xor_sync(~0u, highest[c], distance));
      }
    wait_for_collected(turn, 2);
    if (lane >= 4) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      s.total[slot][group][warp][head(c)] = total[c];
      s.highest[slot][group][warp][head(c)] = kLargest ? highest[kLargest ? c : 0] : kLowest;
      if (warp == 0) s.reference[slot][group][head(c)] = reference[c];
    }
  }

  // Until what was left `ago` rounds, one or two, before this one has been collected.
  __device__ void wait_for_collected(uint32_t turn, uint32_t ago) {
    wait(s.collected[(turn - ago) % 2], (turn - ago) / 2 % 2);
  }

  // Where the warpgroups' results meet, in the place of a token's last tile. A lane has 16 dims of a head.
  __device__ float* meeting_row(int stage, int head) {
    return static_cast<float*>(s.rows.place(stage)) + rows.meeting_row(head) * kMeetingStride;
  }
  __device__ float& sum(int column, int i) { return out[i / 2][column / 2 * 4 + 2 * (i % 2) + column % 2]; }

  // At the end of a token that is not to be joined with parts of other workers, the warpgroup that had its last tile
  // leaves its output in that tile's place...
  __device__ void deposit(int stage, uint32_t turns) {
    const uint32_t first = turns * kRounds;
    leave_sums(first);
    // the other warps may still read the tile
    sync_named<kGroupThreads>(group_barrier(group));
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (round > 0) wait_for_collected(first + round, 1);
#pragma unroll
      for (int c = round * kRoundColumns; c < (round + 1) * kRoundColumns; ++c) leave_column(c, stage);
      arrive_as_warp(s.deposited[(first + round) % 2]);
    }
  }

  // ... and the other one merges it with its own, if it had any, and writes the token's results, or what is a part of
  // them for the merge.
  __device__ void collect(const TokenWork& work, int64_t place, int own_tiles, int stage, uint32_t turns) {
    const uint32_t first = turns * kRounds;
    const int slot = turns % 2;
    leave_sums(first);
    float mine[kColumns], theirs[kColumns];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      wait(s.deposited[(first + round) % 2], (first + round) / 2 % 2);
      if (round == 0) {
        sync_named<kGroupThreads>(group_barrier(group));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) find_factors(mine[c], theirs[c], c, slot);
        if (const int own = threadIdx.x % kGroupThreads; own < kHeads) {
          const Found found = found_of_head(slot, own);
          s.factor[own] = finish_head(p, work.token, head_begin + own, work.whole(), place, found.total,
                                      found.reference, found.highest);
        }
      }
      if (own_tiles > 0) {
#pragma unroll
        for (int c = round * kRoundColumns; c < (round + 1) * kRoundColumns; ++c)
          add_to_row(c, mine[c], theirs[c], stage);
      }
      sync_named<kGroupThreads>(group_barrier(group));
      constexpr int kRoundHeads = kMeetingHeads<kHeads>;
      for (int own = round * kRoundHeads + warp; own < (round + 1) * kRoundHeads && head_begin + own < p.heads;
           own += 4)
        write_row(p, work.token, head_begin + own, work.whole(), place, meeting_row(stage, own), s.factor[own], lane);
      arrive_as_warp(s.collected[(first + round) % 2]);
    }
    arrive_as_warp(s.empty[stage]);
  }

  // What a column's sums, and those of the other warpgroup, are multiplied with to be added.
  __device__ void find_factors(float& mine, float& theirs, int column, int slot) const {
    const float other = s.reference[slot][1 - group][head(column)], raised = fmaxf(reference[column], other);
    mine = exp2_approximate(reference[column] - raised);
    theirs = exp2_approximate(other - raised);
  }

  __device__ void leave_column(int column, int stage) {
    float sums[2 * kLatentBlocks];
#pragma unroll
    for (int k = 0; k < 2 * kLatentBlocks; ++k) sums[k] = sum(column, k);
    rows.put(meeting_row(stage, head(column)), sums);
  }

  // All of the row are read before the first is written, or each would wait for the one before.
  __device__ void add_to_row(int column, float mine, float theirs, int stage) {
    float* const row = meeting_row(stage, head(column));
    float sums[2 * kLatentBlocks];
    rows.get(sums, row);
#pragma unroll
    for (int k = 0; k < 2 * kLatentBlocks; ++k) sums[k] = add_in_any_order(sum(column, k) * mine, sums[k] * theirs);
    rows.put(row, sums);
  }

  // What both warpgroups found for a head, but for its output.
  struct Found {
    float reference, total, highest;
  };
  __device__ Found found_of_head(int slot, int own) const {
    const int other = 1 - group;
    const float a = s.reference[slot][group][own], b = s.reference[slot][other][own], raised = fmaxf(a, b);
    float sums[2] = {}, highest = kLowest;
    for (int w = 0; w < 4; ++w) {
      sums[0] += s.total[slot][group][w][own], sums[1] += s.total[slot][other][w][own];
      highest = fmaxf(highest, fmaxf(s.highest[slot][group][w][own], s.highest[slot][other][w][own]));
    }
    const float sum = add_in_any_order(sums[0] * exp2_approximate(a - raised), sums[1] * exp2_approximate(b - raised));
    return {raised, sum, highest};
  }

  // A part of a token, by contrast, is waited for by other blocks: each warpgroup leaves half of its columns and adds
  // to the others what the other one left of them.
  template <int kGroup>
  __device__ void bring_part_together(int stage, uint32_t turns) {
    static_assert(kRounds == 1);
    constexpr int kHalf = kColumns / 2, kLeft = kGroup == 0 ? kHalf : 0, kAdded = kHalf - kLeft;
    const int slot = turns % 2;
    leave_sums(turns);
    meet();  // nobody reads the tile any more
#pragma unroll
    for (int c = kLeft; c < kLeft + kHalf; ++c) leave_column(c, stage);
    if (warp == 3 && lane < kHeads / 2) {
      const int own = kGroup * (kHeads / 2) + lane;
      const Found found = found_of_head(slot, own);
      s.part[own] = {found.total == 0.0f ? -INFINITY : found.reference, found.total, found.highest,
                     cast_smem_ptr_to_uint(meeting_row(stage, own))};
    }
    float mine[kHalf], theirs[kHalf];
#pragma unroll
    for (int c = 0; c < kHalf; ++c) find_factors(mine[c], theirs[c], kAdded + c, slot);
    meet();
#pragma unroll
    for (int c = 0; c < kHalf; ++c) add_to_row(kAdded + c, mine[c], theirs[c], stage);
  }

  // Both warpgroups wait for one another. racecheck does not see that one group's arrivals at other barriers come after
  // what the other group did before this one, unless this one is of the same kind.
  __device__ void meet() {
#ifdef MLA_RACECHECK
    arrive_as_warp(s.met);
    wait(s.met, meetings++ % 2);
#else
    sync_named<2 * kGroupThreads>(kBothGroups);
#endif
  }

  // Both warpgroups bring the part of a cut token together with the token's other parts.
  __device__ void join(const TokenWork& work) {
    meet();
    const Joints& joints = s.joints;
    const Team team = joints.team;
    if (team.count > 1 && group == 0 && warp == 0) team.arrive(s.team_found, lane);
    // Where sums are in the block of the lane's rank in the team: a block of one has no other tiles than its part's.
    const int tiles = joints.tiles[team.first + min(lane, team.count - 1)];
    const uint32_t first_row = cast_smem_ptr_to_uint(s.rows.place((tiles > 0 ? tiles - 1 : 0) % Rows::kStages));
    if (team.count > 1) wait(s.team_found, 0);
    const auto row_of_head = [&](int own) {
      return first_row + rows.meeting_row(own) * kMeetingStride * static_cast<int>(sizeof(float));
    };
    const auto have_read = [&] {
      if (team.count > 1)
        team.arrive(s.team_read, lane);
      else
        meet();
    };
    join_parts<kHeads>(p, s.part, work.token, joints.parts[work.cut == TokenWork::kContinued], team, head_begin,
                       4 * group + warp, lane, row_of_head, have_read);
    if (team.count > 1) wait(s.team_read, 0);  // nobody reads this block's memory any more
  }

  // Of the first token that has tiles: nothing else is to be done yet, while rows are being looked for.
  __device__ void bring_first_queries(const Worker& worker) {
    int token = worker.token_begin;
    for (; token < worker.token_end; ++token) {
      const TokenWork work = worker.work(token);
      if (work.tile_end > work.tile_begin) break;
    }
    if (token < worker.token_end) Rows::bring_queries(p, s, 0, token, head_begin, 4 * group + warp, lane, [] {});
  }

  __device__ void run(const Worker& worker) {
    if (!kMerged<kHeads> && group == 1 && warp == 3) {  // a warp that has time: its first tile is the second one
      const Neighbours neighbours(worker, lane);        // asked for early
      bring_first_queries(worker);
      s.joints.note(worker, neighbours, kTileTokens, lane);
    } else {
      bring_first_queries(worker);
    }
    find_weights_place();
    uint32_t ordinal = 0, visits = 0, tokens = 0;  // tiles of both groups, own tiles, tokens with tiles
    uint32_t turns = 0;                            // of deposit() and collect()
    int last = 0;                                  // stage of a token's last tile
    for (int token = worker.token_begin; token < worker.token_end; ++token) {
      const TokenWork work = worker.work(token);
      const int tiles = work.tile_end - work.tile_begin;
      if (tiles > 0) {
        const int own_tiles = (tiles + (ordinal % 2 == group)) / 2, query = tokens % Rows::kQueries;
        wait(s.q_full[query], tokens / Rows::kQueries % 2);
        start_token();
        if (own_tiles == 0) arrive_as_warp(s.q_empty[query]);
        for (int i = 0; i < own_tiles; ++i, ++visits) {
          const uint32_t tile = ordinal + 2 * i + (ordinal % 2 != group), stage = tile % Rows::kStages;
          wait(s.full[stage], tile / Rows::kStages % 2);
          publish_to_wgmma();
          rows.compute_scores(score, s.rows, stage, query, s.q_scale[query]);
          if (i == own_tiles - 1) arrive_as_warp(s.q_empty[query]);
          wait(s.weights_free[group], visits % 2 ^ 1);
          softmax(i == 0);
          add_values(stage, tile == ordinal + tiles - 1);
          arrive_as_warp(s.weights_free[group]);
        }
        ordinal += tiles;
        last = (ordinal - 1) % Rows::kStages;
        if (kMerged<kHeads> || work.whole()) {
          if (ordinal % 2 != group)
            deposit(last, turns);
          else
            collect(work, worker.place(work), own_tiles, last, turns);
          ++turns;
        } else if constexpr (!kMerged<kHeads>) {
          group == 0 ? bring_part_together<0>(last, turns) : bring_part_together<1>(last, turns);
        }
        ++tokens;
      } else if (!kMerged<kHeads> && !work.whole()) {
        if (threadIdx.x < kHeads) s.part[threadIdx.x] = {-INFINITY, 0.0f, kLowest, cast_smem_ptr_to_uint(s.weights)};
      } else if (group == 0) {
        write_empty(work, worker.place(work));
      }
      if (kMerged<kHeads> || work.whole()) continue;
      if constexpr (!kMerged<kHeads>) join(work);
      if (tiles > 0 && ordinal % 2 == group) arrive_as_warp(s.empty[last]);
    }
  }

  // The place of a token's last tile is kept.
  __device__ void add_values(int stage, bool keep) {
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b) fence_sums(out[b]);
    rows.add_values(out, s.rows, stage, cast_smem_ptr_to_uint(s.weights[group]), [&] {
      if (!keep) arrive_as_warp(s.empty[stage]);
    });
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b) fence_sums(out[b]);
  }

  __device__ void write_empty(const TokenWork& work, int64_t place) {
    for (int own = warp; own < kHeads && head_begin + own < p.heads; own += 4) {
      const int head = head_begin + own;
      if (lane == 0) finish_head(p, work.token, head, work.whole(), place, 0.0f, kLowest, kLowest);
      write_row(p, work.token, head, work.whole(), place, nullptr, 0.0f, lane);
    }
  }
};

// Block x: heads of a worker, y: the worker.
template <Code kCode, int kHeads, bool kLargest>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionProblem p) {
  using Rows = RowsOf<kCode, kHeads>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kCode, kHeads>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Rows::kStages; ++i) s.full[i].init(Rows::kTileArrivals), s.empty[i].init(4 * kWarpArrivals);
    for (int i = 0; i < kConsumerGroups; ++i) s.weights_free[i].init(4 * kWarpArrivals);
    for (int i = 0; i < Rows::kQueries; ++i)  // eight warps bring queries
      s.q_full[i].init(8 * kWarpArrivals), s.q_empty[i].init(kConsumerWarps * kWarpArrivals);
    for (int i = 0; i < 2; ++i) s.deposited[i].init(4 * kWarpArrivals), s.collected[i].init(4 * kWarpArrivals);
#ifdef MLA_RACECHECK
    s.met.init(2 * kGroupThreads);
#endif
    s.team_found.init(blocks_of_cluster());
    s.team_read.init(kConsumerWarps * blocks_of_cluster());
    s.touched = touch(p);
  }
  if (blocks_of_cluster() > 1)
    cute::cluster_sync();
  else
    __syncthreads();
  const int head_begin = blockIdx.x * kHeads;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  if (warp < kConsumerWarps) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters<kHeads>>();
    wait_for_kernel_before();
    let_next_kernel_begin();
    Consumer<kCode, kHeads, kLargest> consumer{p, s, head_begin, warp / 4, warp % 4, lane, {warp % 4, lane}};
    consumer.run(Worker(p, blockIdx.y, kTileTokens));
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters<kHeads>>();
    wait_for_kernel_before();
    Rows::produce(p, s, head_begin, warp - kConsumerWarps, lane);
  }
}

}  // namespace mla::cuda::sm90::few_heads
