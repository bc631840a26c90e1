// How fp8 rows become tiles, in two steps.
//
//   eight loader warps     rows of the cache, as they are, by cp.async into a ring of two slots of 32 rows
//   eight converter warps  rows of a slot, from e4m3 to f16, into the tile that wgmma reads
//
// The ring is what hides memory's latency: 32 to 64 rows on their way, whatever the converters and consumers wait for.
// It costs every byte one more trip through shared memory, which is dear; but rows that go straight to registers wait
// for one another there, as a warp has few scoreboards, and waiting for one batch of loads is waiting for the next one
// too.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mbarrier.cuh"

namespace mla::cuda::sm90 {

struct RawRing {
  static constexpr int kLoaderWarps = 8;
  static constexpr int kConverterWarps = 8;
  static constexpr int kSlots = 2;
  static constexpr int kSlotRows = 32;
  static constexpr int kTileSlots = kTileTokens / kSlotRows;
  static constexpr int kLoaderRows = kSlotRows / kLoaderWarps;        // of a slot, a warp
  static constexpr int kConverterRows = kSlotRows / kConverterWarps;  // likewise
  static constexpr int kRow = kFp8DsMla.token_bytes();
  static_assert(kConverterRows * 8 == 32 && kLoaderRows * 8 == 32, "rope: a piece a lane");

  alignas(16) uint8_t rows[kSlots][kSlotRows * kRow];
  uint64_t full[kSlots], empty[kSlots];

  __device__ void init() {
    // each loader thread arrives when its copies have, and each warp when it has written the rest
    for (int i = 0; i < kSlots; ++i) {
      init_barrier(full[i], 32 * kLoaderWarps + kLoaderWarps);
      init_barrier(empty[i], kConverterWarps);
    }
  }

  // A loader warp's part. It has rows kLoaderRows * warp and so on of each slot; lane i of 8 knows where row i % 4 of
  // slot i / 4 lies.
  __device__ void load(const Worker& worker, TileInfo* infos, int warp, int lane) {
    TileCursor cursor(worker);
    const int at = lane % 8 / kLoaderRows * kSlotRows + warp * kLoaderRows + lane % kLoaderRows;
    TileRequest next(cursor, at);
    for (int tile = 0; next.token != TileRequest::kEnd; ++tile) {
      const uint32_t own = next.row(worker.p);
      const uint8_t* cache = worker.p.lists[next.list].cache.data;
      next = TileRequest(cursor, at);
      TileInfo& info = infos[tile % kInfoTiles];
#pragma unroll
      for (int slot = 0; slot < kTileSlots; ++slot) {
        wait(empty[slot], tile % 2 ^ 1);
        copy_rows(slot, cache, own, warp, lane);
        if (lane / kLoaderRows == slot) {
          info.held[at] = own != kNoRow;
          copy_piece(shared_address(info.scale[at]), cache + kFp8DsMla.scale_offset(), own);
        }
        arrive_when_copied(full[slot]);
        arrive_as_warp(full[slot]);
      }
    }
  }

  // A converter warp's part of a slot: four rows. `tile` is where the slot's rows go, row `token` of it and on.
  struct Rows {
    uint4 codes[kConverterRows];  // 16 of each row
    uint4 rope;                   // a piece of row lane / 8

    __device__ void load(const RawRing& ring, int slot, int warp, int lane) {
      const uint32_t from = shared_address(ring.rows[slot]) + warp * kConverterRows * kRow;
#pragma unroll
      for (int i = 0; i < kConverterRows; ++i) codes[i] = load_piece(from + i * kRow + kPieceBytes * lane);
      rope = load_piece(from + lane / 8 * kRow + kFp8DsMla.rope_offset() + kPieceBytes * (lane % 8));
    }

    __device__ void store(uint8_t* tile, int slot, int warp, int lane) const {
      const int block = lane / 4, piece = lane % 4 * 2, token = slot * kSlotRows + warp * kConverterRows;
      const uint32_t to =
          shared_address(tile) + block * kBlockBytes + token * kRowBytes + place_of_piece(block, piece, token);
#pragma unroll
      for (int i = 0; i < kConverterRows; ++i) {
        store_piece((to ^ i * kPieceBytes) + i * kRowBytes, e4m3_to_f16(codes[i].x, codes[i].y));
        store_piece((to ^ (i ^ 1) * kPieceBytes) + i * kRowBytes, e4m3_to_f16(codes[i].z, codes[i].w));
      }
      store_rope(tile, rope, token, lane);
    }
  };

 private:
  __device__ void copy_rows(int slot, const uint8_t* cache, uint32_t own, int warp, int lane) {
    const uint32_t to = shared_address(rows[slot]) + warp * kLoaderRows * kRow;
    const uint8_t* codes = cache + kPieceBytes * lane;
#pragma unroll
    for (int i = 0; i < kLoaderRows; ++i)
      copy_piece(to + i * kRow + kPieceBytes * lane, codes, __shfl_sync(~0u, own, slot * kLoaderRows + i));
    const int rope = kFp8DsMla.rope_offset() + kPieceBytes * (lane % 8);
    copy_piece(to + lane / 8 * kRow + rope, cache + rope, __shfl_sync(~0u, own, slot * kLoaderRows + lane / 8));
  }
};

}  // namespace mla::cuda::sm90
