// Converts rows of e4m3 numbers to tiles of bf16 numbers. A power of two times an e4m3 number is a bf16 number, so this
// is exact, and the tile's consumers need not know.
//
// Eight warps have eight rows of a tile each. A warp copies its raw rows into the tile's own memory, which has room as
// bf16 is larger. Some tiles later it reads them, four at a time, and writes them back as bf16. So rows in flight take
// neither registers nor extra memory.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/copy_rows.cuh"
#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/nvfp4_rows.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pairs.cuh"

namespace mla::cuda::sm90 {

template <Rows kRows, bool kPaged>
struct RowConverter {
  static constexpr int kWarpRows = RowCopier::kRows;
  static constexpr int kBlocks = blocks_of(kRows), kLastBlock = kBlocks - 1;
  static constexpr bool kOfTensor = kRows == Rows::fp8_tensor_576;

  const AttentionProblem& p;
  const int warp, lane;
  TileCursor cursor;
  TileRequest<kPaged> next;  // the tile that is copied next

  __device__ RowConverter(const CtaWork& cta, int warp, int lane, const EarlySlot& early = {})
      : p(cta.p), warp(warp), lane(lane), cursor(cta), next(cursor, slot_of_lane(), 1, early) {}

  __device__ bool done() const { return next.token == TileRequest<kPaged>::kEnd; }

  // Starts the copies of the next tile. Returns which list it belongs to.
  __device__ int copy(uint8_t* tile, uint8_t (&valid)[kTileTokens]) {
    const int list = next.list;
    const CacheView& view = p.lists[list].cache;
    const uint32_t own = next.row(p);
    if (!view.format.quantised()) {
      RowCopier::copy<kBlocks>(tile, valid, view.data, own, p.row_unit, warp, lane);
    } else {
      const uint32_t part = part_of(tile), to = part + lane * kPieceBytes;
      const bool has_latent = lane < view.format.latent / kPieceBytes;
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const uint32_t row = __shfl_sync(~0u, own, i);
        if (has_latent) copy_piece(to + offset_of_row(i), view.data + lane * kPieceBytes, row, p.row_unit);
      }
      copy_rope(part, view, own);
      if (view.format.group && lane < kWarpRows) {
        const uint32_t scales = part + offset_of_scales(lane);
        if (view.format.scales_at == ScalesAt::in_row)
          copy_piece(scales, view.data + view.format.scale_offset(), own, p.row_unit);
        else
          copy_8_or_zero(scales, own == kNoRow ? view.data : next.scales(p), own != kNoRow);
      }
      if (lane < kWarpRows) valid[warp * kWarpRows + lane] = own != kNoRow;
    }
    next = TileRequest<kPaged>(cursor, slot_of_lane());
    return list;
  }

  // Converts a tile whose copies are complete, in place.
  __device__ void convert(uint8_t* tile, int list) const {
    __syncwarp();
    const CacheFormat& format = p.lists[list].cache.format;
    if (!format.quantised()) return;
    const uint32_t part = part_of(tile);
    const int block = lane / 4, piece = lane % 4 * 2;
    const bool has_latent = lane < format.latent / kPieceBytes;
    const bool has_scales = !kOfTensor && format.group > 0;
    const uint32_t group = has_scales ? lane * kPieceBytes / format.group : 0;
    const uint32_t to = part + block * kBlockBytes + offset_of_piece(block, piece, 0);
#pragma unroll
    for (int first = 0; first < kWarpRows; first += kRowsAtOnce) {
      uint4 bytes[kRowsAtOnce];
      uint32_t scale[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        bytes[i] = load_piece(part + offset_of_row(first + i) + lane * kPieceBytes);
        scale[i] = has_scales ? power_of_two(load_byte(part + offset_of_scales(first + i) + group)) : kOne;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = first + i;
        uint4 numbers[2];
        e4m3_times(bytes[i], scale[i], numbers);
        store_piece_if(has_latent, rows_further(to, row), numbers[0]);
        store_piece_if(has_latent, rows_further(other_piece(to, 1), row), numbers[1]);
      }
    }
    if constexpr (kOfTensor) {
      const int row = lane / 4;
      const uint32_t rope = part + kLastBlock * kBlockBytes;
      const uint4 bytes = load_piece(rope + lane * kPieceBytes);
      __syncwarp();
      uint4 numbers[2];
      e4m3_times(bytes, kOne, numbers);
      store_piece(rope + row * kRowBytes + offset_of_piece(kLastBlock, piece, row), numbers[0]);
      store_piece(rope + row * kRowBytes + offset_of_piece(kLastBlock, piece + 1, row), numbers[1]);
    }
  }

 private:
  static constexpr int kRowsAtOnce = 4;

  __device__ int slot_of_lane() const { return warp * kWarpRows + lane % kWarpRows; }
  // The warp's rows of the tile's first block.
  __device__ uint32_t part_of(uint8_t* tile) const {
    return cast_smem_ptr_to_uint(tile) + warp * kWarpRows * kRowBytes;
  }

  // Staging offset of raw row i, from the warp's part of block 0 on. Raw row i < 4 takes rows 0 to 3 of the warp's part
  // of block i, the others rows 4 to 7 of block i - 4. So four converted rows overwrite only raw rows that have been
  // read.
  static __device__ constexpr uint32_t offset_of_row(int i) {
    return i % kRowsAtOnce * kBlockBytes + i / kRowsAtOnce * kRowsAtOnce * kRowBytes;
  }
  static __device__ uint32_t offset_of_scales(int i) {
    return kRowsAtOnce * kBlockBytes + i / kRowsAtOnce * kRowsAtOnce * kRowBytes + i % kRowsAtOnce * kPieceBytes;
  }

  // Copies rope: bf16 to its final address, e4m3 to the warp's part of the last block.
  __device__ void copy_rope(uint32_t part, const CacheView& view, uint32_t own) const {
    const uint8_t* const from = view.data + view.format.rope_offset();
    const uint32_t to = part + kLastBlock * kBlockBytes;
    if constexpr (kOfTensor) {
      copy_piece(to + lane * kPieceBytes, from + lane % 4 * kPieceBytes, __shfl_sync(~0u, own, lane / 4), p.row_unit);
    } else if (view.format.rope > 0) {
#pragma unroll
      for (int i = 0; i < kWarpRows; i += 4) {
        const int row = i + lane / 8;
        copy_piece(to + row * kRowBytes + offset_of_piece(kLastBlock, lane % 8, row), from + lane % 8 * kPieceBytes,
                   __shfl_sync(~0u, own, row), p.row_unit);
      }
    }
  }

  static constexpr uint32_t kOne = 0x3f803f80u;

  // A ue8m0 byte as a pair of bf16: 2^(scale - 127), NaN for 255.
  static __device__ uint32_t power_of_two(uint32_t scale) {
    const uint32_t bits = max(scale << 7, 0x40u);
    return (bits + (scale == 255)) * 0x10001u;
  }

  static __device__ void store_piece_if(bool condition, uint32_t shared_address, uint4 piece) {
    asm volatile(
        "{\n"
        ".reg .pred condition;\n"
        "setp.ne.u32 condition, %5, 0;\n"
        "@condition st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n"
        "}" ::"r"(shared_address),
        "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w), "r"(static_cast<uint32_t>(condition))
        : "memory");
  }

  static __device__ uint32_t load_byte(uint32_t shared_address) {
    uint32_t byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(shared_address) : "memory");
    return byte;
  }
};

// Eight warps produce a CTA's tiles. `begin_token(token)` is called after a token's first tile, if that is the CTA's
// tile kFirstQueries or a later one.
template <Rows kRows, bool kPaged, int kFirstQueries, int kStages, typename BeginToken>
__device__ __forceinline__ void produce_converted(const CtaWork& cta, uint8_t (&tiles)[kStages][tile_bytes_of(kRows)],
                                                  uint8_t (&valid)[kStages][kTileTokens], Barrier (&full)[kStages],
                                                  Barrier (&empty)[kStages], int warp, int lane, const EarlySlot& early,
                                                  BeginToken begin_token) {
  if constexpr (kRows == Rows::nvfp4_352)
    return produce_nvfp4<kPaged, kFirstQueries>(cta, tiles, valid, full, empty, warp, lane, early, begin_token);
  constexpr int kAhead = kStages - 1;  // tiles in flight
  RowConverter<kRows, kPaged> rows(cta, warp, lane, early);
  uint32_t lists = 0;  // a bit per stage: its tile's list
  const auto copy = [&](int tile) {
    if (!rows.done()) {
      const int stage = tile % kStages;
      wait(empty[stage], tile / kStages % 2 ^ 1);
      const uint32_t list = rows.copy(tiles[stage], valid[stage]);
      lists = (lists & ~(1u << stage)) | list << stage;
    }
    close_copies();
  };
  for (int tile = 0; tile < kAhead; ++tile) copy(tile);
  cta.each_tile([&](int tile, int token, bool first) {
    const int stage = tile % kStages;
    wait_for_copies<kAhead - 1>();
    rows.convert(tiles[stage], lists >> stage & 1);
    arrive_as_warp(full[stage]);
    if (first && tile >= kFirstQueries) begin_token(token);
    copy(tile + kAhead);
  });
}

}  // namespace mla::cuda::sm90
