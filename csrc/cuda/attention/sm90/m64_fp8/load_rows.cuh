// Rows on their way to shared memory.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/m64_fp8/config.h"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"

namespace mla::cuda::sm90::m64_fp8 {

// Four warps load rows. A warp computes the addresses of its rows of two tiles at once, a lane a row.
template <Rows kRows>
struct Producer {
  static constexpr int kBatch = 32 / kWarpRows;  // tiles
  static constexpr uint32_t kAllRows = (1 << kWarpRows) - 1;
  static constexpr int kBytes = Shared<kRows>::kBytes, kPitch = Shared<kRows>::kPitch;

  static __device__ void run(const AttentionProblem& p, Shared<kRows>& s, const CtaWork& cta, int warp, int lane) {
    const int first = warp * kWarpRows, at = first + lane % kWarpRows;
    TileCursor cursor(cta);
    cursor.advance(lane / kWarpRows);
    TileRequest<false> next(cursor, at, kBatch);
    uint32_t row = kNoRow;
    int batch = 0;  // 2 * token (as in TileRequest) + list
    for (int tile = 0;; ++tile) {
      if (tile % kBatch == 0) {
        row = next.row(p);
        batch = next.token * 2 + next.list;
        next = TileRequest<false>(cursor, at, kBatch);
      }
      const int first_lane = tile % kBatch * kWarpRows;
      const int both = __shfl_sync(~0u, batch, first_lane);
      if (both >> 1 == next.kEnd) return;
      const uint8_t* cache = p.lists[both & 1].cache.data;
      const uint32_t own = __shfl_sync(~0u, row, first_lane + lane % kWarpRows);
      const int stage = tile % kStages;
      wait(s.empty[stage], tile / kStages % 2 ^ 1);
      copy(s, stage, first, cache, own, p.row_unit, lane);
    }
  }

  // Starts the copies of a warp's rows, one each. `own` is where row lane % kWarpRows of them lies. Missing rows become
  // zeros, as values are multiplied by weights of 0.
  static __device__ void copy(Shared<kRows>& s, int stage, int first, const uint8_t* cache, uint32_t own, uint32_t unit,
                              int lane) {
    const bool valid = own != kNoRow;
    const uint32_t rows = __ballot_sync(~0u, valid && lane < kWarpRows);
    uint8_t (&to)[kTileTokens][kPitch] = s.stages[stage].rows;
    if (lane < kWarpRows) s.valid[stage][first + lane] = valid;
    if (rows != kAllRows) {
      for (uint32_t missing = rows ^ kAllRows; missing; missing &= missing - 1)
        for (int at = lane * kPieceBytes; at < kBytes; at += 32 * kPieceBytes)
          *reinterpret_cast<uint4*>(&to[first + __ffs(static_cast<int>(missing)) - 1][at]) = {};
      fence_async_shared();  // bulk copies will come to the same rows
    }
    __syncwarp();
    if (lane < kWarpArrivals) {
      if (lane == 0)
        arrive_and_expect(s.full[stage], __popc(rows) * kBytes);
      else
        s.full[stage].arrive();
    }
    __syncwarp();
    if (lane < kWarpRows && valid)
      copy_bulk(cast_smem_ptr_to_uint(to[first + lane]), cache + uint64_t{own} * unit, kBytes, s.full[stage]);
  }
};

}  // namespace mla::cuda::sm90::m64_fp8
