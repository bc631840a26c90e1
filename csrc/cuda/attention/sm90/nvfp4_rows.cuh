// Converts nvfp4_352 rows to tiles of bf16 numbers, divided by kNvfp4Factor, exactly.
//
// Eight warps have eight rows of a tile each. Of a raw row a lane has 16 numbers and their scale, so rows in flight fit
// into registers: as soon as a row is converted, its registers wait for the same row of the next tile. They need no
// shared memory, and the loads don't wait for a tile to become free.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/copy_rows.cuh"
#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90 {

constexpr int kConvertedArrivals = kWarpArrivals * RowCopier::kWarps;  // at a converted tile's barrier

// Eight numbers times `by`, a pair of bf16. A number's bits, moved to where bf16 has them, are the number times 2^-126,
// also for subnormals.
__device__ __forceinline__ uint4 e2m1_times(uint32_t numbers, uint32_t by) {
  const uint32_t even = numbers & 0x0f0f0f0fu, odd = numbers >> 4 & 0x0f0f0f0fu;
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t two;  // a number in the low bits of either half; a byte below 0x80 is also a source of zeros
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(two) : "r"(even), "r"(odd), "r"(0xc480 + 0x1111 * i));
    pairs[i] = times<Number::bf16>(two * (1u << 12 | 1u << 6) & 0x81c081c0u, by);  // sign, and all else
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

template <bool kPaged>
struct Nvfp4Converter {
  static constexpr int kWarpRows = RowCopier::kRows;
  static constexpr int kLaneBytes = kNvfp4.latent_bytes() / 32;
  static_assert(kLaneBytes == 8 && kNvfp4.group == 2 * kLaneBytes, "a lane has a group of each row");

  const AttentionProblem& p;
  const int warp, lane;
  TileCursor cursor;
  TileRequest<kPaged> next;

  uint32_t own;  // where row lane % 8 of the tile in flight lies
  // the lane's part of the cache's first row
  uint64_t from_numbers, from_scale;
  uint2 numbers[kWarpRows];
  uint32_t scale[kWarpRows];
  uint4 rope;  // a piece of row lane / 4

  __device__ Nvfp4Converter(const CtaWork& cta, int warp, int lane, const EarlySlot& early)
      : p(cta.p), warp(warp), lane(lane), cursor(cta), next(cursor, slot_of_lane(), 1, early) {}

  __device__ int slot_of_lane() const { return warp * kWarpRows + lane % kWarpRows; }

  // Finds the rows of the next tile, if there is one.
  __device__ void find() {
    own = next.row(p);
    from_numbers = reinterpret_cast<uint64_t>(p.lists[next.list].cache.data + lane * kLaneBytes);
    from_scale = from_numbers + kNvfp4.scale_offset() + nvfp4_scale(lane) - lane * kLaneBytes;
    hide(from_numbers), hide(from_scale);  // or the compiler adds them up again for every row
    next = TileRequest<kPaged>(cursor, slot_of_lane());
  }

  __device__ void load(int i) {
    const uint32_t row = __shfl_sync(~0u, own, i);
    asm volatile(
        "{\n"
        ".reg .pred valid;\n"
        "setp.ne.u32 valid, %4, -1;\n"
        "mov.u32 %0, 0;\n"
        "mov.u32 %1, 0;\n"
        "mov.u32 %2, 0;\n"
        "@valid ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%3];\n"
        "@valid ld.global.L1::no_allocate.u8 %2, [%5];\n"
        "}"
        : "=&r"(numbers[i].x), "=&r"(numbers[i].y), "=&r"(scale[i])
        : "l"(from_numbers + uint64_t{row} * p.row_unit), "r"(row), "l"(from_scale + uint64_t{row} * p.row_unit)
        : "memory");
  }

  __device__ void load_rope() {
    const uint32_t row = __shfl_sync(~0u, own, lane / 4);
    asm volatile(
        "{\n"
        ".reg .pred valid;\n"
        "setp.ne.u32 valid, %5, -1;\n"
        "mov.u32 %0, 0;\n"
        "mov.u32 %1, 0;\n"
        "mov.u32 %2, 0;\n"
        "mov.u32 %3, 0;\n"
        "@valid ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(rope.x), "=&r"(rope.y), "=&r"(rope.z), "=&r"(rope.w)
        : "l"(from_numbers + uint64_t{row} * p.row_unit + kNvfp4.rope_offset() + lane % 4 * kPieceBytes -
              lane * kLaneBytes),
          "r"(row)
        : "memory");
  }

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) load(i);
    load_rope();
  }

  // Writes the tile in flight, and loads the next one if `more`.
  __device__ void convert(uint8_t* tile, uint8_t (&valid)[kTileTokens], bool more) {
    if (lane < kWarpRows) valid[slot_of_lane()] = own != kNoRow;
    own = kNoRow;
    if (more) find();
    const uint32_t part = cast_smem_ptr_to_uint(tile) + warp * kWarpRows * kRowBytes;
    const int block = lane / 4, piece = lane % 4 * 2;
    const uint32_t to = part + block * kBlockBytes + offset_of_piece(block, piece, 0);
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      uint32_t two[2];
      e4m3_to_f16(scale[i], two);
      const float own = unpack_f16(two[0]).x * (0x1p126f / kNvfp4Factor);
      const uint32_t by = pack_bf16(own, own);
      store_piece(rows_further(to, i), e2m1_times(numbers[i].x, by));
      store_piece(rows_further(other_piece(to, 1), i), e2m1_times(numbers[i].y, by));
      // ptxas moves no loads across this: it would convert all rows first
      if (i % 2) load(i - 1), load(i), __syncwarp();
    }
    constexpr uint32_t kOneth = 0x3b803b80u;  // 1 / kNvfp4Factor, as a pair of bf16
    uint4 both[2];
    e4m3_times(rope, kOneth, both);
    const int row = lane / 4;
    const uint32_t last = part + kLatentBlocks * kBlockBytes + row * kRowBytes;
    store_piece(last + offset_of_piece(kLatentBlocks, piece, row), both[0]);
    store_piece(last + offset_of_piece(kLatentBlocks, piece + 1, row), both[1]);
    load_rope();
  }
};

// As produce_converted(). The tile after a token's first one is loaded after `begin_token`: there are registers for
// either.
template <bool kPaged, int kFirstQueries, int kStages, int kTileBytes, typename BeginToken>
__device__ __forceinline__ void produce_nvfp4(const CtaWork& cta, uint8_t (&tiles)[kStages][kTileBytes],
                                              uint8_t (&valid)[kStages][kTileTokens], Barrier (&full)[kStages],
                                              Barrier (&empty)[kStages], int warp, int lane, const EarlySlot& early,
                                              BeginToken begin_token) {
  Nvfp4Converter<kPaged> rows(cta, warp, lane, early);
  rows.find();
  rows.load();
  cta.each_tile([&](int tile, int token, bool first) {
    const int stage = tile % kStages;
    wait(empty[stage], tile / kStages % 2 ^ 1);
    const bool begins = first && tile >= kFirstQueries;
    rows.convert(tiles[stage], valid[stage], !begins);
    arrive_as_warp(full[stage]);
    if (!begins) return;
    begin_token(token);
    rows.find();
    rows.load();
  });
}

}  // namespace mla::cuda::sm90
