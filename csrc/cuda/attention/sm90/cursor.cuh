// Walks a CTA's tiles, and finds where their rows lie.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/tile.h"
#include "cuda/attention/work.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/mma.cuh"
#include "mla/problem.h"

namespace mla::cuda::sm90 {

constexpr uint32_t kNoRow = ~0u;

// A CTA's tiles across its tokens. Tokens without tiles are skipped.
struct TileCursor {
  const CtaWork& cta;
  TokenWork work;
  int tile;

  __device__ explicit TileCursor(const CtaWork& w) : cta(w) {
    work.token = cta.token_begin - 1;
    tile = work.tile_end = 0;
    step_over_empty();
  }
  __device__ bool done() const { return work.token >= cta.token_end; }
  __device__ void advance(int tiles = 1) {
    tile += tiles;
    step_over_empty();
  }

 private:
  __device__ void step_over_empty() {
    while (work.token < cta.token_end && tile >= work.tile_end) {
      tile -= work.tile_end;
      if (++work.token >= cta.token_end) break;
      work = cta.work(work.token);
      tile += work.tile_begin;
    }
  }
};

// A slot of the CTA's first token, loaded before the length of its list is known, so that both loads are in flight
// together (sparse attention). It is slot `at` of the tile `later` tiles after the CTA's first one. Beyond the
// list's end it is not used.
struct EarlySlot {
  int token = -1, tile = 0;
  int32_t slot = -1;

  __device__ EarlySlot() {}
  template <bool kPaged>
  static __device__ EarlySlot unless(const CtaWork& cta, int later, int at) {
    return kPaged ? EarlySlot() : EarlySlot(cta, later, at);
  }
  __device__ EarlySlot(const CtaWork& cta, int later, int at) {
    if (cta.token_begin >= cta.token_end || cta.entry.tile_begin < 0 || at >= cta.tile_slots) return;
    const SlotList& from = cta.p.lists[0];
    const int64_t index = (int64_t{cta.entry.tile_begin} + later) * cta.tile_slots + at;
    if (index >= from.topk) return;
    token = cta.token_begin, tile = cta.entry.tile_begin + later;
    slot = load_now(from.entries + token * from.stride + index);
  }

 private:
  // Volatile, so that the load is issued here: the compiler would first wait for the length.
  static __device__ int32_t load_now(const int32_t* from) {
    int32_t number;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(number) : "l"(from) : "memory");
    return number;
  }
};

// A tile whose slots are being loaded. A lane holds one slot.
template <bool kPaged>
struct TileRequest {
  static constexpr int kEnd = -1, kSameToken = -2;

  int32_t slot;
  int list;
  int token;  // the token, if this is its first tile; else kSameToken; kEnd if there are no more tiles

  // `at` is the lane's slot in the tile. The cursor moves on by `step` tiles.
  __device__ TileRequest(TileCursor& cursor, int at, int step = 1, const EarlySlot& early = {}) {
    slot = -1, list = 0, token = kEnd;
    if (cursor.done()) return;
    const TokenWork& work = cursor.work;
    const TileSlots slots = slots_of(work, cursor.tile, cursor.cta.tile_slots);
    const SlotList& from = cursor.cta.p.lists[slots.list];
    if (at < slots.count) {
      const int index = slots.begin + at;
      const bool known = slots.list == 0 && early.token == work.token && early.tile == cursor.tile;
      if constexpr (kPaged)
        slot = static_cast<int32_t>(from.slot_in_pages(work.token, index));
      else
        slot = known ? early.slot : from.entries[work.token * from.stride + index];
    }
    list = slots.list;
    token = cursor.tile == work.tile_begin ? work.token : kSameToken;
    cursor.advance(step);
  }

  // The row's offset from the cache's beginning in units of p.row_unit, or kNoRow. Dispatch makes sure that it and
  // block sizes fit into 32 bits.
  __device__ uint32_t row(const AttentionProblem& p) const {
    const SlotList& from = p.lists[list];
    const CacheView& cache = from.cache;
    if (token == kEnd || !cache.holds(slot)) return kNoRow;
    if (cache.block_stride == cache.block_size * cache.row_stride) return static_cast<uint32_t>(slot) * from.row_units;
    const uint32_t size = static_cast<uint32_t>(cache.block_size), block = static_cast<uint32_t>(slot) / size;
    return block * from.block_units + (static_cast<uint32_t>(slot) - block * size) * from.row_units;
  }

  // The address of the row's scales. There must be a row.
  __device__ const uint8_t* scales(const AttentionProblem& p) const {
    const CacheView& cache = p.lists[list].cache;
    const uint32_t size = static_cast<uint32_t>(cache.block_size), block = static_cast<uint32_t>(slot) / size,
                   offset = static_cast<uint32_t>(slot) - block * size;
    const uint8_t* const page = cache.data + block * cache.block_stride;
    if (cache.format.scales_at == ScalesAt::in_row)
      return page + offset * cache.row_stride + cache.format.scale_offset();
    return page + size * cache.row_stride + offset * cache.format.scale_bytes();
  }
};

__device__ __forceinline__ uint4 load_piece(uint32_t shared_address) {
  uint4 piece;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "r"(shared_address)
               : "memory");
  return piece;
}

__device__ __forceinline__ void store_piece(uint32_t shared_address, uint4 piece) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address), "r"(piece.x), "r"(piece.y),
               "r"(piece.z), "r"(piece.w)
               : "memory");
}

// Starts the copy of a row's piece to shared memory, or writes zeros if there is no row. `from` is the same piece of
// the cache's first row. Rows are counted in units of `unit` bytes.
__device__ __forceinline__ void copy_piece(uint32_t to_shared, const uint8_t* from, uint32_t row, uint32_t unit) {
  const bool valid = row != kNoRow;
  copy_16_or_zero(to_shared, from + uint64_t{valid ? row : 0} * unit, valid);
}

}  // namespace mla::cuda::sm90
