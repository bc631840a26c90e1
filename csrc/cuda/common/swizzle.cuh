// Rows of 16-byte pieces in shared memory with the 128-byte swizzle of wgmma: piece c of row r lies at c ^ (r % 8).
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"
#include "mla/platform.h"

namespace mla::cuda {

constexpr int kRowBytes = 128;   // of an operand
constexpr int kPieceBytes = 16;  // 8 numbers of 16 bits
constexpr int kAtomRows = 8;     // the swizzle's period

// The address of a piece. `rows` is the address of row 0, a multiple of 1024.
template <int kBytes = kRowBytes>
MLA_HOST_DEVICE constexpr uint32_t swizzled(uint32_t rows, int row, int piece) {
  return rows + row * kBytes + (piece ^ row % kAtomRows) * kPieceBytes;
}

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

// Whether eight lanes that access one piece of eight neighbouring rows each, as ldmatrix and stmatrix do, use all
// banks.
template <int kBytes = kRowBytes>
constexpr bool rows_in_different_banks() {
  for (int piece = 0; piece < kBytes / kPieceBytes; ++piece) {
    uint32_t used = 0;
    for (int row = 0; row < kAtomRows; ++row) used |= 1u << swizzled<kBytes>(0, row, piece) / kPieceBytes % 8;
    if (used != 0xff) return false;
  }
  return true;
}
static_assert(rows_in_different_banks() && rows_in_different_banks<512>());
static_assert(rows_further(swizzled(0, 8, 3), 5) == swizzled(0, 13, 3));

}  // namespace mla::cuda
