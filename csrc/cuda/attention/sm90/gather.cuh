// The producing half of the Hopper kernels: eight warps bring cached rows into shared memory, each eight rows of a tile.
//
// Rows go through registers, in two halves of four rows a warp. While one half is converted and stored, the other one's
// loads are under way, and the next tile's slots have been read before: so a multiprocessor has 32 to 64 rows in flight
// at any time, without shared memory to keep them in.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/tile.h"
#include "cuda/attention/work.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mbarrier.cuh"
#include "mla/problem.h"

namespace mla::cuda::sm90 {

constexpr int kGatherWarps = 8;
constexpr int kWarpRows = kTileTokens / kGatherWarps;
constexpr int kHalfRows = kWarpRows / 2;
static_assert(kHalfRows * 8 == 32, "rope of a half: a piece a lane");

// Rows are read once: they may leave the first-level cache at once.
__device__ __forceinline__ uint4 load_piece(const uint8_t* from) {
  uint4 piece;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "l"(from));
  return piece;
}

__device__ __forceinline__ uint4 load_piece_or_zero(const uint8_t* row, int offset) {
  return row ? load_piece(row + offset) : uint4{};
}

// A pointer that another lane has.
__device__ __forceinline__ const uint8_t* from_lane(const uint8_t* pointer, int lane) {
  return reinterpret_cast<const uint8_t*>(
      __shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Four rows on their way. Lanes 0 to 7 have the pointers of the warp's eight rows, null where a slot is none.
template <Code kCode>
struct HalfTile;

template <>
struct HalfTile<Code::e4m3> {
  uint4 codes[kHalfRows];  // 16 of each row
  uint4 rope;              // a piece of row lane / 8
  uint4 scales;            // in the lane that has the row's pointer
  bool held;               // likewise: the slot is one

  __device__ void load(const uint8_t* row, int first, int lane) {
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i)
      codes[i] = load_piece_or_zero(from_lane(row, first + i), kPieceBytes * lane);
    rope = load_piece_or_zero(from_lane(row, first + lane / 8),
                              kFp8DsMla.rope_offset() + kPieceBytes * (lane % 8));
    held = row != nullptr;
    scales = load_piece_or_zero(lane / kHalfRows == first / kHalfRows ? row : nullptr, kFp8DsMla.scale_offset());
  }

  __device__ void store(uint8_t* tile, TokenInfo* info, int warp, int first, int lane) const {
    const int block = lane / 4, piece = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i) {
      const int token = warp * kWarpRows + first + i;
      uint8_t* to = tile + block * kBlockBytes + token * kRowBytes;
      *reinterpret_cast<uint4*>(to + place_of_piece(block, piece, first + i)) =
          e4m3_to_f16(codes[i].x, codes[i].y);
      *reinterpret_cast<uint4*>(to + place_of_piece(block, piece + 1, first + i)) =
          e4m3_to_f16(codes[i].z, codes[i].w);
    }
    const int row = first + lane / 8;
    *reinterpret_cast<uint4*>(tile + kLatentBlocks * kBlockBytes + (warp * kWarpRows + row) * kRowBytes +
                              place_of_piece(kLatentBlocks, lane % 8, row)) = rope;
    if (lane / kHalfRows == first / kHalfRows) {
      TokenInfo& own = info[warp * kWarpRows + lane];
      *reinterpret_cast<uint4*>(own.scale) = scales;
      const uint32_t largest = max(max(scales.x & 0x7fffffffu, scales.y & 0x7fffffffu),
                                   max(scales.z & 0x7fffffffu, scales.w & 0x7fffffffu));
      // kept where 2^lift and 2^-lift, times what they are multiplied with, are fp32 numbers
      const int lift = min(max(static_cast<int>(largest >> 23) - 126, -60), 60);
      own.lift = static_cast<float>(lift);
      own.bias = held ? 0.0f : -INFINITY;
    }
  }
};

template <>
struct HalfTile<Code::bf16> {
  uint4 latent[kHalfRows][2];
  uint4 rope;
  bool held;

  __device__ void load(const uint8_t* row, int first, int lane) {
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i) {
      const uint8_t* from = from_lane(row, first + i);
#pragma unroll
      for (int j = 0; j < 2; ++j) latent[i][j] = load_piece_or_zero(from, kPieceBytes * (lane + 32 * j));
    }
    rope = load_piece_or_zero(from_lane(row, first + lane / 8), kBf16.rope_offset() + kPieceBytes * (lane % 8));
    held = row != nullptr;
  }

  __device__ void store(uint8_t* tile, TokenInfo* info, int warp, int first, int lane) const {
#pragma unroll
    for (int i = 0; i < kHalfRows; ++i) {
      const int token = warp * kWarpRows + first + i;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int block = lane / 8 + 4 * j;
        *reinterpret_cast<uint4*>(tile + block * kBlockBytes + token * kRowBytes +
                                  place_of_piece(block, lane % 8, first + i)) = latent[i][j];
      }
    }
    const int row = first + lane / 8;
    *reinterpret_cast<uint4*>(tile + kLatentBlocks * kBlockBytes + (warp * kWarpRows + row) * kRowBytes +
                              place_of_piece(kLatentBlocks, lane % 8, row)) = rope;
    if (lane / kHalfRows == first / kHalfRows) info[warp * kWarpRows + lane].bias = held ? 0.0f : -INFINITY;
  }
};

// A worker's tiles one after the other, across its tokens; tokens without any are passed over.
struct TileCursor {
  const Worker& worker;
  TokenWork work;
  int tile;

  __device__ explicit TileCursor(const Worker& w) : worker(w) {
    work.token = worker.token_begin - 1;
    tile = work.tile_end = 0;
    step_over_empty();
  }
  __device__ bool done() const { return work.token >= worker.token_end; }
  __device__ void advance() {
    ++tile;
    step_over_empty();
  }

 private:
  __device__ void step_over_empty() {
    while (work.token < worker.token_end && tile >= work.tile_end) {
      if (++work.token >= worker.token_end) break;
      work = worker.work(work.token);
      tile = work.tile_begin;
    }
  }
};

// A tile whose slots have been asked for: this lane's, of row lane % 8 of its warp.
struct TileRequest {
  int32_t slot;
  int list;
  int token;
  bool starts_token;
  bool exists;

  // Asks for the cursor's tile and moves it on.
  __device__ TileRequest(TileCursor& cursor, int warp, int lane) {
    slot = -1, list = 0, token = 0, starts_token = false;
    exists = !cursor.done();
    if (!exists) return;
    const TokenWork& work = cursor.work;
    const TileSlots slots = slots_of(work, cursor.tile, cursor.worker.granule);
    const SlotList& from = cursor.worker.p.lists[slots.list];
    list = slots.list, token = work.token, starts_token = cursor.tile == work.tile_begin;
    const int at = warp * kWarpRows + lane % kWarpRows;
    if (at < slots.count) slot = from.slots[work.token * from.stride + slots.begin + at];
    cursor.advance();
  }

  // Where the row lies, or null.
  __device__ const uint8_t* row(const AttentionProblem& p) const {
    const CacheView& cache = p.lists[list].cache;
    if (!cache.holds(slot)) return nullptr;
    const uint32_t size = static_cast<uint32_t>(cache.block_size), block = static_cast<uint32_t>(slot) / size;
    return cache.data + block * cache.block_stride + (static_cast<uint32_t>(slot) - block * size) * cache.row_stride;
  }
};

}  // namespace mla::cuda::sm90
