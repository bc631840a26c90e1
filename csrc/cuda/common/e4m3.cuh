// e4m3 on the GPU: conversion instructions on sm_89 and later, mla/number.h elsewhere. Both give the same bits.
#pragma once

#include <cstdint>

#include "cuda/common/pairs.cuh"
#include "mla/number.h"

namespace mla::cuda {

// Two numbers to two bytes, the first in the lower byte.
__device__ __forceinline__ uint16_t to_e4m3x2(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
  return bytes;
#else
  return static_cast<uint16_t>(float_to_e4m3(first) | float_to_e4m3(second) << 8);
#endif
}

// Four bytes to f16, which holds every e4m3 number.
__device__ __forceinline__ void e4m3_to_f16(uint32_t bytes, uint32_t (&numbers)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(numbers[0]), "=r"(numbers[1])
      : "r"(bytes));
#else
  // a byte's bits, moved to where f16 has them, are the number times 2^-8, also for subnormals
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = __byte_perm(bytes, 0, i == 0 ? 0x4140 : 0x4342);  // a byte in each half
    const uint32_t shifted = (pair & 0x007f007fu) << 7 | (pair & 0x00800080u) << 8;
    constexpr uint32_t kTwoTo8 = 0x5c005c00u;  // as a pair of f16
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(numbers[i]) : "r"(shifted), "r"(kTwoTo8));
    numbers[i] |= __vcmpeq2(pair & 0x007f007fu, 0x007f007fu) & 0x7fff7fffu;  // NaN
  }
#endif
}

// The same for eight bytes.
__device__ __forceinline__ uint4 e4m3_to_f16(uint32_t first, uint32_t second) {
  uint32_t low[2], high[2];
  e4m3_to_f16(first, low);
  e4m3_to_f16(second, high);
  return {low[0], low[1], high[0], high[1]};
}

// Four bytes to bf16, which holds every e4m3 number. A byte's bits, moved to where bf16 has them, are the number times
// 2^-120, also for subnormals. One multiplication undoes that.
__device__ __forceinline__ void e4m3_to_bf16(uint32_t bytes, uint32_t (&numbers)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = __byte_perm(bytes, 0, i == 0 ? 0x4140 : 0x4342);  // a byte in each half
    const uint32_t shifted = (pair & 0x007f007fu) << 4 | (pair & 0x00800080u) << 8;
    constexpr uint32_t kTwoTo120 = 0x7b807b80u, kMinusZero = 0x80008000u;  // as pairs of bf16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(numbers[i]) : "r"(shifted), "r"(kTwoTo120), "r"(kMinusZero));
  }
  const uint32_t nan = __vcmpeq4(bytes & 0x7f7f7f7fu, 0x7f7f7f7fu);  // 0xff for each such byte
  if (nan) {
    numbers[0] |= __byte_perm(nan, 0, 0x1100) & 0x7fff7fffu;
    numbers[1] |= __byte_perm(nan, 0, 0x3322) & 0x7fff7fffu;
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Sixteen bytes times `by`, a pair of bf16. It converts through f16 and fp32: half as many instructions as
// e4m3_to_bf16, and they don't compete for the integer units.
__device__ __forceinline__ void e4m3_times(const uint4& bytes, uint32_t by, uint4 (&numbers)[2]) {
  const uint4 f16[2] = {e4m3_to_f16(bytes.x, bytes.y), e4m3_to_f16(bytes.z, bytes.w)};
  const auto product = [by](uint32_t pair) {
    const float2 two = unpack_f16(pair);
    return times<Number::bf16>(pack_bf16(two.x, two.y), by);
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) numbers[i] = {product(f16[i].x), product(f16[i].y), product(f16[i].z), product(f16[i].w)};
}
#endif

}  // namespace mla::cuda
