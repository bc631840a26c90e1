// e4m3 on the GPU: the conversion instructions where there are any (sm_89 and later), with the same bits as
// mla/number.h, which serves the rest.
#pragma once

#include <cstdint>

#include "mla/number.h"

namespace mla::cuda {

// Two numbers to two codes, the first in the lower byte.
__device__ __forceinline__ uint16_t to_e4m3x2(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  return static_cast<uint16_t>(float_to_e4m3(first) | float_to_e4m3(second) << 8);
#endif
}

}  // namespace mla::cuda
