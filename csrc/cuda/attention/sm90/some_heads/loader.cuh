// Rows from the cache, by one warpgroup: as they are, to where wgmma reads codes and rope.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/some_heads/config.h"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"

namespace mla::cuda::sm90::some_heads {

// Each thread's when its copies are there, each warp's for the rest.
constexpr int kLoaderArrivals = 32 * kWarps + kWarps;

__device__ __forceinline__ void load_rows(Shared& s, const Worker& worker, int warp, int lane) {
  TileCursor cursor(worker);
  const int first = warp * kLoaderRows, at = first + lane % kLoaderRows;
  TileRequest next(cursor, at);
  for (int tile = 0; next.token != TileRequest::kEnd; ++tile) {
    const int stage = tile % kStages;
    const uint32_t own = next.row(worker.p);
    const uint8_t* cache = worker.p.lists[next.list].cache.data;
    next = TileRequest(cursor, at);
    wait(s.empty[stage], tile / kStages % 2 ^ 1);
    const uint32_t codes = shared_address(s.codes[stage][lane / 8]) + first * kRowBytes + lane % 8 * kPieceBytes;
#pragma unroll
    for (int i = 0; i < kLoaderRows; ++i)
      copy_piece((codes ^ (i & 7) * kPieceBytes) + i * kRowBytes, cache + kPieceBytes * lane, __shfl_sync(~0u, own, i));
    const uint8_t* rope = cache + kFp8DsMla.rope_offset() + kPieceBytes * (lane % 8);
#pragma unroll
    for (int i = 0; i < kLoaderRows; i += 4) {
      const int row = i + lane / 8;
      copy_piece(shared_address(s.rope[stage]) + (first + row) * kRowBytes + (lane % 8 ^ (row & 7)) * kPieceBytes, rope,
                 __shfl_sync(~0u, own, row));
    }
    const uint8_t* scale = cache + kFp8DsMla.scale_offset() + 4 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kLoaderRows; i += 8) {
      const uint32_t row = __shfl_sync(~0u, own, i + lane / 4);
      const bool held = row != kNoRow;
      copy_4_or_zero(shared_address(&s.scale[stage][lane % 4][first + i + lane / 4]),
                     scale + uint64_t{held ? row : 0} * kPieceBytes, held);
    }
    if (lane < kLoaderRows) s.held[stage][at] = own != kNoRow;
    arrive_when_copied(s.full[stage]);
    arrive_as_warp(s.full[stage]);
  }
}

}  // namespace mla::cuda::sm90::some_heads
