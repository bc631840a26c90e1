// Copies rows of 16-bit numbers to tiles. Only the order of 16-byte pieces changes, so eight warps use cp.async. A
// tile's copies start as soon as its stage is empty, while the other stage is consumed.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"

namespace mla::cuda::sm90 {

struct RowCopier {
  static constexpr int kWarps = 8;
  static constexpr int kRows = kTileTokens / kWarps;  // per warp
  // arrivals at a tile's barrier: one per thread when its copies are complete, and one per warp for the valid mask
  static constexpr int kArrivals = (32 + kWarpArrivals) * kWarps;

  // `own` of lanes 0 to 7 says where the warp's rows lie (TileRequest::row). `valid` is the tile's mask.
  template <int kBlocks>
  static __device__ void copy(uint8_t* tile, uint8_t (&valid)[kTileTokens], const uint8_t* cache, uint32_t own,
                              uint32_t unit, int warp, int lane) {
    const int block = lane / 8, token = warp * kRows;
    const uint32_t to =
        cast_smem_ptr_to_uint(tile) + block * kBlockBytes + token * kRowBytes + offset_of_piece(block, lane % 8, token);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t row = __shfl_sync(~0u, own, i), first = rows_further(to, i);
      const uint8_t* from = cache + kPieceBytes * lane;
      copy_piece(first, from, row, unit);
      copy_piece(first + 4 * kBlockBytes, from + 32 * kPieceBytes, row, unit);  // the same order four blocks further on
    }
    if constexpr (kBlocks > kLatentBlocks) {
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const int row = i + lane / 8;
        copy_piece(cast_smem_ptr_to_uint(tile) + kLatentBlocks * kBlockBytes + (token + row) * kRowBytes +
                       offset_of_piece(kLatentBlocks, lane % 8, row),
                   cache + kBf16.rope_offset() + kPieceBytes * (lane % 8), __shfl_sync(~0u, own, row), unit);
      }
    }
    if (lane < kRows) valid[token + lane] = own != kNoRow;
  }
};

}  // namespace mla::cuda::sm90
