// Pairs of 16-bit numbers.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace mla::cuda {

enum class Number { f16, bf16 };

template <Number kNumber>
__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t by) {
  uint32_t product;
  if constexpr (kNumber == Number::f16)
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(by));
  else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(by));
  return product;
}

template <Number kNumber>
__device__ __forceinline__ uint4 times(uint4 pairs, uint32_t by) {
  return {times<kNumber>(pairs.x, by), times<kNumber>(pairs.y, by), times<kNumber>(pairs.z, by),
          times<kNumber>(pairs.w, by)};
}

// Two fp32 numbers rounded, the first in the lower half.
template <Number kNumber>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  return kNumber == Number::f16 ? pack_f16(first, second) : pack_bf16(first, second);
}

}  // namespace mla::cuda
