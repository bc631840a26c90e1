// A partial result's row of 512 fp32 numbers in half the bytes: f16 numbers, and a power of two for each half of the
// row. The rounding error is 2^-11 of a value, an eighth of that of bf16 outputs; for tiny values it is 2^-39 of the
// half's largest value.
#pragma once

#include <cstdint>

#include "mla/number.h"
#include "mla/workspace.h"

namespace mla::cuda {

// Numbers keep the order of wgmma's accumulator registers, so that a lane stores 16 bytes at once. Piece i holds what
// lane i % 4 has of 32 neighbouring columns: a pair from each 8.
struct CompactRow {
  uint4 pieces[kValueDim / 8];
  float factor[2];  // a value is its number times its half's factor
};

__device__ __forceinline__ CompactRow& compact_row(const Partials& partials, int64_t row) {
  static_assert(sizeof(CompactRow) <= kValueDim * sizeof(float));
  return *reinterpret_cast<CompactRow*>(partials.out + row * kValueDim);
}

// The power of two that brings a half's largest magnitude to 2^14 to 2^15. For an infinite one it is 2^0: a smaller
// factor times a weight could become 0, and 0 times infinity is NaN. So it is for zeros: what divides by it is finite.
__device__ __forceinline__ int compact_power(float largest) {
  const int exponent = static_cast<int>(float_bits(largest) >> 23);
  return exponent == 255 || exponent == 0 ? 0 : max(exponent - 127 - 14, -100);
}

}  // namespace mla::cuda
