// Pairs of 16-bit numbers.
#pragma once

#include <cstdint>

namespace mla::cuda {

enum class Number { f16, bf16 };

// Two fp32 numbers rounded to bf16, the first in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float first, float second) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}

// The same in f16.
__device__ __forceinline__ uint32_t pack_f16(float first, float second) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}

// The same, to either type.
template <Number kNumber>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  return kNumber == Number::f16 ? pack_f16(first, second) : pack_bf16(first, second);
}

// A pair of f16 numbers to fp32, the lower half first.
__device__ __forceinline__ float2 unpack_f16(uint32_t pair) {
  float2 two;
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.f32.f16 %0, first;\n"
      "cvt.f32.f16 %1, second;\n"
      "}"
      : "=f"(two.x), "=f"(two.y)
      : "r"(pair));
  return two;
}

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

}  // namespace mla::cuda
