// A part's row of 512 sums in half of its bytes: f16 numbers, and a power of two for each half of the row. Rounding
// takes 2^-11 of a value, an eighth of what bf16 outputs lose, or 2^-39 of the half's largest where that is more.
#pragma once

#include <cstdint>

#include "mla/number.h"
#include "mla/workspace.h"

namespace mla::cuda {

// Numbers are in the order in which lanes have wgmma's sums, so that a lane writes what it has at once: a piece has a
// pair of numbers of each of four neighbouring eights, those that lane `i % 4` has of them.
struct CompactRow {
  uint4 pieces[kValueDim / 8];
  float factor[2];  // a value is its number times its half's factor
};

__device__ __forceinline__ CompactRow& compact_row(const Partials& partials, int64_t row) {
  static_assert(sizeof(CompactRow) <= kValueDim * sizeof(float));
  return *reinterpret_cast<CompactRow*>(partials.out + row * kValueDim);
}

// `largest` is 0 or more. Values are divided by 2^compact_power, so that the largest one of a half is from 2^14 to
// 2^15. Where it is infinite, they stay as they are: a smaller factor times a weight could be 0, and 0 times infinity
// is NaN.
__device__ __forceinline__ int compact_power(float largest) {
  const int exponent = static_cast<int>(float_bits(largest) >> 23);
  return exponent == 255 ? 0 : max(exponent - 127 - 14, -100);
}

}  // namespace mla::cuda
