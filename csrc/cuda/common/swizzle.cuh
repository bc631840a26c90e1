// Rows of 16-byte pieces in shared memory with the 128-byte swizzle of wgmma: piece c of row r lies at c ^ (r % 8).
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "mla/platform.h"

namespace mla::cuda {

constexpr int kRowBytes = 128;   // of an operand
constexpr int kPieceBytes = 16;  // 8 numbers of 16 bits
constexpr int kAtomRows = 8;     // the swizzle's period

// The offset of a piece in a row; `row` is the row's number among its eight.
MLA_HOST_DEVICE constexpr int offset_in_row(int row, int piece) { return (piece ^ row) * kPieceBytes; }

// The address of a piece. `rows` is the address of row 0, a multiple of 1024.
template <int kBytes = kRowBytes>
MLA_HOST_DEVICE constexpr uint32_t swizzled(uint32_t rows, int row, int piece) {
  return rows + row * kBytes + offset_in_row(row % kAtomRows, piece);
}

// The address of piece `piece ^ change` of a row, given that of its piece `piece`.
MLA_HOST_DEVICE constexpr uint32_t other_piece(uint32_t address, int change) { return address ^ change * kPieceBytes; }

// The address of a row's piece, given that of the same piece of the row `rows` before. That row is a multiple of eight.
MLA_HOST_DEVICE constexpr uint32_t rows_further(uint32_t address, int rows) {
  return (address ^ rows % kAtomRows * kPieceBytes) + rows * kRowBytes;
}

// An operand of kRows rows.
template <int kRows>
struct SwizzledRows {
  static_assert(kRows % kAtomRows == 0);
  alignas(1024) uint8_t bytes[kRows * kRowBytes];

  __device__ __forceinline__ uint32_t address() const { return cast_smem_ptr_to_uint(bytes); }
  __device__ __forceinline__ uint32_t address(int row, int piece) const { return swizzled(address(), row, piece); }
};

// Whether eight lanes use all banks, if lane i accesses piece piece_of(i) of row row_of(i).
template <int kBytes = kRowBytes, typename Row, typename Piece>
constexpr bool lanes_in_different_banks(Row row_of, Piece piece_of) {
  uint32_t used = 0;
  for (int lane = 0; lane < 8; ++lane)
    used |= 1u << swizzled<kBytes>(0, row_of(lane), piece_of(lane)) / kPieceBytes % 8;
  return used == 0xff;
}

// The same if they access one piece of eight neighbouring rows, as ldmatrix and stmatrix do.
template <int kBytes = kRowBytes>
constexpr bool rows_in_different_banks() {
  for (int piece = 0; piece < kBytes / kPieceBytes; ++piece)
    if (!lanes_in_different_banks<kBytes>([](int lane) { return lane; }, [&](int) { return piece; })) return false;
  return true;
}
static_assert(rows_in_different_banks() && rows_in_different_banks<512>());
static_assert(rows_further(swizzled(0, 8, 3), 5) == swizzled(0, 13, 3));
static_assert(other_piece(swizzled(0, 5, 1), 6) == swizzled(0, 5, 7));

}  // namespace mla::cuda
