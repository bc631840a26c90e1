// Rows that lie in shared memory as they are in the cache: how eight warps load them, and which outputs a lane has.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/swap_ab/reduction.h"
#include "cuda/common/cluster.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::swap_ab {

// The base of Own, the layout of rows.
template <typename Own, int kHeads>
struct RawRows {
  static constexpr int kWarps = 8;                        // producers
  static constexpr int kWarpRows = kTileTokens / kWarps;  // of a tile, per warp
  static constexpr int kTileArrivals = (32 + kWarpArrivals) * kWarps;
  static constexpr int kGroupDims = kValueDim / kGroups;  // a warp's output dims
  static constexpr int kLaneDims = kGroupDims / 8;
  static constexpr int kValueSteps = kTileTokens / 16;

  const int warp, lane;  // warp of the warpgroup

  // A head's row in the reduction buffer. Heads of four neighbouring lanes (every other head) are neighbours: with
  // kReductionStride, the pieces of eight lanes then lie in different banks.
  static __device__ int reduction_row(int head) {
    return head % kReductionHeads<kHeads> / 2 + head % 2 * (kReductionHeads<kHeads> / 2);
  }
  // A lane has neighbouring dims.
  __device__ float4* dims(float* row) const {
    return reinterpret_cast<float4*>(row + kGroupDims * warp + kLaneDims * (lane / 4));
  }
  __device__ void get(float (&acc)[kLaneDims], float* row) const {
#pragma unroll
    for (int i = 0; i < kLaneDims / 4; ++i) {
      const float4 x = dims(row)[i];
      acc[4 * i] = x.x, acc[4 * i + 1] = x.y, acc[4 * i + 2] = x.z, acc[4 * i + 3] = x.w;
    }
  }
  __device__ void put(float* row, const float (&acc)[kLaneDims]) const {
#pragma unroll
    for (int i = 0; i < kLaneDims / 4; ++i) dims(row)[i] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
  }

  // out += values times P, whose descriptor this is, in steps of 16 tokens. `begin(step)` is called before each;
  // convert(rows, step, part) then makes operand A of the two products of each of four parts: four neighbouring ones of
  // a lane's dims. Rows are converted while the products before are in flight.
  template <typename Begin, typename Convert>
  static __device__ void add_in_steps(float (&out)[kLaneDims / 2][kHeads / 2], uint64_t probs, Begin begin,
                                      Convert convert) {
    uint32_t rows[2][2][4];
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      begin(step);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        if (step > 0 || part > 1) cute::warpgroup_wait<1>();
        convert(rows[part % 2], step, part);
        cute::warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < 2; ++i)
          wgmma<F16RowsAtom<kHeads>>(out[2 * part + i], rows[part % 2][i], probs + ((step * 32) >> 4));
        cute::warpgroup_commit_batch();
      }
    }
    cute::warpgroup_wait<0>();
  }

  // Eight warps load a token's queries. `wait_for_room` is called when the first loads are in flight.
  template <typename Shared, typename Wait>
  static __device__ void produce_queries(const AttentionProblem& p, Shared& s, int query, int token, int head_begin,
                                         int warp, int lane, Wait wait_for_room) {
    using Queries = typename Own::Queries;
#pragma unroll 1
    for (int head = warp * Queries::kAtOnce; head < kHeads; head += Queries::kStep) {
      Queries queries;
      queries.load(p, token, head_begin, head, lane);
      if (head < Queries::kStep) wait_for_room();
      Own::store_queries(queries, p.scale, s, query, head, lane);
    }
    arrive_as_warp(s.q_full[query]);
  }

  // Eight warps load rows, and a token's queries once its first rows are in flight; consumers load those of the very
  // first token. A warp computes the addresses of its rows of four tiles at once, a lane a row. It loads slots four
  // tiles ahead.
  template <bool kPaged, typename Shared>
  static __device__ void produce(const AttentionProblem& p, Shared& s, int head_begin, int warp, int lane) {
    constexpr int kBatch = 32 / kWarpRows;  // tiles
    // Load the next slots after a tile's copies have been issued, if a register for the row can be spared meanwhile.
    constexpr bool kCopiesFirst = kHeads <= 16 && !kPaged;
    const CtaWork cta(p, blockIdx.y, kTileTokens);
    const int first = warp * kWarpRows, at = first + lane % kWarpRows;
    const auto early = EarlySlot::unless<kPaged>(cta, lane / kWarpRows, at);
    TileCursor cursor(cta);
    cursor.advance(lane / kWarpRows);
    TileRequest<kPaged> next(cursor, at, kBatch, early);
    wait_for_cluster();
    uint32_t row = kNoRow;
    int batch = 0;  // 2 * token (as in TileRequest) + list
    for (int tile = 0, tokens = 1;; ++tile) {
      if (tile % kBatch == 0) {
        row = next.row(p);
        batch = next.token * 2 + next.list;
        if constexpr (!kCopiesFirst) next = TileRequest<kPaged>(cursor, at, kBatch);
      }
      const int first_lane = tile % kBatch * kWarpRows;
      const int both = __shfl_sync(~0u, batch, first_lane), token = both >> 1;
      if (token == next.kEnd) return;
      const uint8_t* cache = p.lists[both & 1].cache.data;
      const uint32_t own = __shfl_sync(~0u, row, first_lane + lane % kWarpRows);
      const int stage = tile % Own::kStages;
      wait(s.empty[stage], tile / Own::kStages % 2 ^ 1);
      Own::copy(s.rows, stage, first, at, cache, own, p.row_unit, lane);
      arrive_when_copied(s.full[stage]);
      arrive_as_warp(s.full[stage]);
      if (kCopiesFirst && tile % kBatch == 0) next = TileRequest<kPaged>(cursor, at, kBatch);
      if (token == next.kSameToken || tile == 0) continue;
      const int query = tokens % Own::kQueries;
      produce_queries(p, s, query, token, head_begin, warp, lane,
                      [&] { wait(s.q_empty[query], tokens / Own::kQueries % 2 ^ 1); });
      ++tokens;
    }
  }
};

}  // namespace mla::cuda::sm90::swap_ab
