// Rows of 16-bit numbers, or converted to them on load. wgmma reads a tile as it is, along its rows (scores) and across
// them (values).
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/convert_rows.cuh"
#include "cuda/attention/sm90/queries.cuh"
#include "cuda/attention/sm90/swap_ab/reduction.h"
#include "cuda/common/cluster.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::swap_ab {

template <Rows kRows, int kHeads>
struct PlainRows {
  static constexpr int kBlocks = blocks_of(kRows);
  static constexpr Number kNumber = number_of(kRows);
  static constexpr int kStages = kRows == Rows::any_512 ? 3 : 2;  // tiles
  static constexpr int kQueries = 1;                              // buffers for a token's queries
  static constexpr int kAccRegisters = kHeads / 2;
  static constexpr int kTileArrivals = is_converted(kRows) ? kConvertedArrivals : RowCopier::kArrivals;

  struct Memory {
    alignas(1024) uint8_t tiles[kStages][tile_bytes_of(kRows)];
    alignas(1024) uint8_t q[kBlocks][kHeads * kRowBytes];
    uint8_t valid[kStages][kTileTokens];  // whether the slot is one

    __device__ void* reduction_buffer(int stage) { return tiles[stage]; }
  };
  static constexpr bool kReducesInTile = true;

  const int warp, lane;  // warp of the warpgroup

  // log2 of an extra factor of a token's P (fp8_rows.cuh): none.
  __device__ float lift(int) const { return 0.0f; }

  // The scores of a tile's tokens 16 * warp + lane / 4 and that plus 8, in the order of wgmma's accumulators.
  __device__ void compute_scores(float (&score)[kAccRegisters], Memory& s, int stage, int, const float* q_scale) const {
    const uint64_t k_rows = smem_descriptor(cast_smem_ptr_to_uint(s.tiles[stage])),
                   q = smem_descriptor(cast_smem_ptr_to_uint(s.q));
    float acc[kAccRegisters];
    cute::warpgroup_arrive();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<HalfAtom<kNumber, kHeads, Major::K, Major::K>>(acc, k_rows + ((block * kBlockBytes + k * 32) >> 4),
                                                             q + ((block * kHeads * kRowBytes + k * 32) >> 4),
                                                             block > 0 || k > 0);
    cute::warpgroup_commit_batch();
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) bias[i] = s.valid[stage][warp * 16 + lane / 4 + 8 * i] ? 0.0f : -INFINITY;
    cute::warpgroup_wait<0>();
    fence_acc(acc);
    scale_scores(score, acc, q_scale, bias, lane);
  }

  // Two heads' P of the lane's upper or lower token, as operand B has them.
  __device__ uint32_t pack(float first, float second, int) const { return mla::cuda::pack<kNumber>(first, second); }

  // out += values times P, which lies in shared memory. `release` is called when the tile has been read.
  template <typename Release>
  __device__ void add_values(float (&out)[kLatentBlocks][kAccRegisters], Memory& s, int stage, uint32_t probs_address,
                             Release release) const {
    const uint64_t tile = smem_descriptor(cast_smem_ptr_to_uint(s.tiles[stage])),
                   probs = smem_descriptor(probs_address);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int block = 0; block < kLatentBlocks; ++block)
        wgmma<HalfAtom<kNumber, kHeads, Major::MN, Major::K>>(
            out[block], tile + ((block * kBlockBytes + k * 16 * kRowBytes) >> 4), probs + ((k * 32) >> 4), true);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    release();
  }

  // A head's row in the reduction buffer. With kReductionStride, a warp's accesses (eight dims of every other head of
  // eight) lie in different banks.
  static __device__ int reduction_row(int head) { return head % kReductionHeads<kHeads>; }
  // A lane has two dims of each block, 8 apart.
  static constexpr int kLaneDims = 2 * kLatentBlocks;
  __device__ int dim(int i) const { return i / 2 * kBlockDims + warp * 16 + lane / 4 + 8 * swapped(i / 2, i % 2); }
  __device__ void get(float (&acc)[kLaneDims], const float* row) const {
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) acc[i] = row[dim(i)];
  }
  __device__ void put(float* row, const float (&acc)[kLaneDims]) const {
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) row[dim(i)] = acc[i];
  }

  // Eight warps load a token's queries. `wait_for_room` is called when the first loads are in flight.
  template <typename Shared, typename Wait>
  static __device__ void produce_queries(const AttentionProblem& p, Shared& s, int query, int token, int head_begin,
                                         int warp, int lane, Wait wait_for_room) {
    load_queries<false, kHeads>(p, s.rows.q, s.q_scale[query], token, head_begin, warp, lane, wait_for_room);
    arrive_as_warp(s.q_full[query]);
  }

  // Eight warps load tiles, and a token's queries once its first tile is in flight. Consumers load those of the very
  // first token.
  template <bool kPaged, typename Shared>
  static __device__ void produce(const AttentionProblem& p, Shared& s, int head_begin, int warp, int lane) {
    const CtaWork cta(p, blockIdx.y, kTileTokens);
    const int at = warp * RowCopier::kRows + lane % RowCopier::kRows;
    const auto early = EarlySlot::unless<kPaged>(cta, 0, at);
    wait_for_cluster();
    int tokens = 1;
    const auto begin_token = [&](int token) {
      produce_queries(p, s, 0, token, head_begin, warp, lane, [&] { wait(s.q_empty[0], tokens % 2 ^ 1); });
      ++tokens;
    };
    if constexpr (is_converted(kRows)) {
      produce_converted<kRows, kPaged, 1>(cta, s.rows.tiles, s.rows.valid, s.full, s.empty, warp, lane, early,
                                          begin_token);
    } else {
      TileCursor cursor(cta);
      TileRequest<kPaged> next(cursor, at, 1, early);
      for (int tile = 0; next.token != next.kEnd; ++tile) {
        const uint32_t row = next.row(p);
        const uint8_t* cache = p.lists[next.list].cache.data;
        const int token = next.token, stage = tile % kStages;
        next = TileRequest<kPaged>(cursor, at);
        wait(s.empty[stage], tile / kStages % 2 ^ 1);
        RowCopier::copy<kBlocks>(s.rows.tiles[stage], s.rows.valid[stage], cache, row, p.row_unit, warp, lane);
        arrive_when_copied(s.full[stage]);
        arrive_as_warp(s.full[stage]);
        if (token != next.kSameToken && tile > 0) begin_token(token);
      }
    }
  }
};

}  // namespace mla::cuda::sm90::swap_ab
