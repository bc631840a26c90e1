// e4m3 on the GPU: the conversion instructions where there are any (sm_89 and later), with the same bits as
// mla/number.h, which serves the rest.
#pragma once

#include <cstdint>

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
  // the bits of a byte, moved to where f16 has them, are the number times 2^-8, subnormal or not
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

// Eight bytes.
__device__ __forceinline__ uint4 e4m3_to_f16(uint32_t first, uint32_t second) {
  uint32_t low[2], high[2];
  e4m3_to_f16(first, low);
  e4m3_to_f16(second, high);
  return {low[0], low[1], high[0], high[1]};
}

// Four bytes to bf16, which holds every e4m3 number. The bits of a byte, moved to where bf16 has them, are the number
// times 2^-120, subnormal or not; one multiplication brings it back.
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
// Sixteen bytes to bf16, times `by`: a power of two from 2^-7 on as a pair of bf16, 2^120 times what they are to be
// multiplied with. NaN does not become NaN, but has_nan() tells from what is returned: the larger ones of `largest` and
// of all magnitudes, for the next bytes.
__device__ __forceinline__ uint32_t e4m3_to_bf16_but_nan(const uint4& bytes, uint32_t by, uint4 (&numbers)[2],
                                                         uint32_t largest) {
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t magnitude[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t upper = __byte_perm(words[i], 0, k == 0 ? 0x1404 : 0x3424);  // each byte is a number's upper one
      magnitude[k] = upper >> 4 & 0x07f007f0u;
      uint32_t& pair = pairs[2 * i + k];
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(magnitude[k]), "r"(by));
      pair |= upper & 0x80008000u;
    }
    largest = __vimax3_u16x2(largest, magnitude[0], magnitude[1]);
  }
  numbers[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  numbers[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
  return largest;
}
__device__ __forceinline__ bool has_nan(uint32_t largest) { return (largest + 0x00100010u) & 0x08000800u; }
#endif

}  // namespace mla::cuda
