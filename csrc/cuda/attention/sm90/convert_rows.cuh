// How rows of e4m3 numbers become tiles of bf16 numbers. A power of two times an e4m3 number is a bf16 number, so
// nothing is lost, and whoever multiplies the tile does not know where it came from.
//
// Eight warps have eight rows of a tile each. A row's bytes wait in registers from the time when the tile before is
// converted: while a stage is consumed, a whole tile is on its way, and shared memory is written only once.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/copy_rows.cuh"
#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/pairs.cuh"

namespace mla::cuda::sm90 {

// A warp's rows of a tile. A lane knows where row lane % 8 lies.
struct RowSource {
  const uint8_t* cache;
  uint32_t row;     // see TileRequest::row
  uint32_t scales;  // bytes 4 * (lane / 8) and on of the row's scales
  int lanes;        // that have 16 e4m3 numbers of a row each; 0: rows of bf16 numbers, or none
  int group_lanes;  // log2 of the lanes that share a scale
  bool rope;        // bf16 numbers behind the e4m3 ones

  template <Rows kRows>
  static __device__ RowSource of(const TileRequest& request, const AttentionProblem& p, int lane) {
    const CacheView& view = p.lists[request.list].cache;
    RowSource source{view.data, request.row(p), 0x7f7f7f7fu, 0, 0, false};
    if (request.token == TileRequest::kEnd) return source;
    if constexpr (kRows == Rows::fp8_tensor_576) {
      source.lanes = kLatent / 16;
    } else if (view.format.quantised()) {
      source.lanes = view.format.latent / 16;
      source.rope = view.format.rope > 0;
      source.group_lanes = source.rope ? 2 : 1;
      const int words = source.rope ? 2 : 4;
      if (source.row != kNoRow && lane < 8 * words)
        source.scales = load_once(reinterpret_cast<const uint32_t*>(request.scales(p)) + lane / 8);
      if (source.rope && lane / 8 == 1) source.scales &= 0x00ffffffu;  // the last byte is padding
    }
    return source;
  }

 private:
  static __device__ uint32_t load_once(const uint32_t* from) {
    uint32_t word;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
  }
};

static_assert(kFp8Model1.latent == 448 && kFp8Model1.group == 4 * 16 && kFp8Model1.scale_bytes() == 2 * 4);
static_assert(kFp8_528.latent == 512 && kFp8_528.group == 2 * 16 && kFp8_528.scale_bytes() == 4 * 4);

// kAhead: rows of a warp that are on their way at once.
template <Rows kRows, int kAhead>
struct RowConverter {
  static constexpr int kWarpRows = RowCopier::kRows;
  static constexpr int kBlocks = blocks_of(kRows);
  // Of a tile's rope a lane has two pieces of bf16 numbers, or one of e4m3 numbers.
  static constexpr bool kRopeOfTensor = kRows == Rows::fp8_tensor_576;
  static constexpr int kRopePieces = kRopeOfTensor ? 1 : 2;
  static constexpr uint32_t kOne = 0x7b807b80u;  // see e4m3_to_bf16: what makes a number itself

  uint4 bytes[kAhead];
  uint4 rope[kRopePieces];

  // Starts the loads of a tile's first rows.
  __device__ void start(const RowSource& source, int lane) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_row(bytes[i], source, i, lane);
    load_rope(source, lane);
  }

  // Makes a tile of the rows that are on their way, and starts the loads of the next ones.
  __device__ void make_tile(uint8_t* tile, uint8_t (&valid)[kTileTokens], const RowSource& source,
                            const RowSource& next, int warp, int lane) {
    if (source.lanes == 0) {
      RowCopier::copy<kBlocks>(tile, valid, source.cache, source.row, warp, lane);
      start(next, lane);
      return;
    }
    const uint32_t part = cast_smem_ptr_to_uint(tile) + warp * kWarpRows * kRowBytes;
    store_rope(part, source, lane);
    load_rope(next, lane);
    // scales that are too large for one multiplication, or NaN
    const bool large = !kRopeOfTensor && __any_sync(~0u, __vcmpgtu4(source.scales, kLargest * 0x01010101u) != 0);
    const int group = lane >> source.group_lanes;
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      uint32_t by = kOne, more = 0;
      if constexpr (!kRopeOfTensor) {
        const uint32_t scale = __shfl_sync(~0u, source.scales, i + group / 4 * 8) >> (group % 4 * 8) & 0xff;
        by = power_of_two(min(scale, kLargest) + 120);
        if (large) more = scale == 0xff ? kNaN : power_of_two(max(scale, kLargest) - kLargest + 127);
      }
      uint4 numbers[2];
      e4m3_to_bf16(bytes[i % kAhead], by, numbers);
      if (large) numbers[0] = times<Number::bf16>(numbers[0], more), numbers[1] = times<Number::bf16>(numbers[1], more);
      if (lane < source.lanes) store_two(part + lane / 4 * kBlockBytes, lane / 4, lane % 4 * 2, i, numbers);
      if (i + kAhead < kWarpRows)
        load_row(bytes[i % kAhead], source, i + kAhead, lane);
      else
        load_row(bytes[i % kAhead], next, i + kAhead - kWarpRows, lane);
    }
    if (lane < kWarpRows) valid[warp * kWarpRows + lane] = source.row != kNoRow;
  }

 private:
  static constexpr uint32_t kLargest = 134, kNaN = 0x7fff7fffu;

  static __device__ uint32_t power_of_two(uint32_t exponent) { return (exponent << 7) * 0x10001u; }

  static __device__ void store_two(uint32_t to, int block, int piece, int row, const uint4 (&numbers)[2]) {
    store_piece(to + row * kRowBytes + offset_of_piece(block, piece, row), numbers[0]);
    store_piece(to + row * kRowBytes + offset_of_piece(block, piece + 1, row), numbers[1]);
  }

  // Zeros where there is no row. Past the first-level cache, as nobody reads it again.
  static __device__ void load(uint4& to, const uint8_t* from, bool valid) {
    asm volatile(
        "{\n"
        ".reg .pred valid;\n"
        "setp.ne.u32 valid, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(to.x), "=&r"(to.y), "=&r"(to.z), "=&r"(to.w)
        : "l"(from), "r"(static_cast<uint32_t>(valid)));
  }

  static __device__ const uint8_t* address(const RowSource& source, uint32_t row, int piece) {
    return source.cache + (uint64_t{row == kNoRow ? 0 : row} + piece) * kPieceBytes;
  }

  static __device__ void load_row(uint4& to, const RowSource& source, int i, int lane) {
    const uint32_t row = __shfl_sync(~0u, source.row, i);
    load(to, address(source, row, lane), row != kNoRow && lane < source.lanes);
  }

  __device__ void load_rope(const RowSource& source, int lane) {
    if constexpr (kRopeOfTensor) {
      const uint32_t row = __shfl_sync(~0u, source.row, lane / 4);
      load(rope[0], address(source, row, kLatent / 16 + lane % 4), row != kNoRow && source.lanes > 0);
    } else if (source.rope) {
#pragma unroll
      for (int i = 0; i < kRopePieces; ++i) {
        const uint32_t row = __shfl_sync(~0u, source.row, 4 * i + lane / 8);
        load(rope[i], address(source, row, kFp8Model1.rope_offset() / kPieceBytes + lane % 8), row != kNoRow);
      }
    }
  }

  __device__ void store_rope(uint32_t part, const RowSource& source, int lane) const {
    constexpr int kBlock = kBlocks - 1;  // the last one
    if constexpr (kRopeOfTensor) {
      uint4 numbers[2];
      e4m3_to_bf16(rope[0], kOne, numbers);
      store_two(part + kBlock * kBlockBytes, kBlock, lane % 4 * 2, lane / 4, numbers);
    } else if (source.rope) {
#pragma unroll
      for (int i = 0; i < kRopePieces; ++i) {
        const int row = 4 * i + lane / 8;
        store_piece(part + kBlock * kBlockBytes + row * kRowBytes + offset_of_piece(kBlock, lane % 8, row), rope[i]);
      }
    }
  }
};

}  // namespace mla::cuda::sm90
