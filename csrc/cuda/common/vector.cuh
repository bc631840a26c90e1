// Loads and stores of rows: 16 bytes at a time where rows are aligned to that, else byte by byte.
#pragma once

#include <cstdint>

#include "mla/platform.h"
#include "mla/problem.h"

namespace mla::cuda {

MLA_HOST_DEVICE bool aligned16(const void* base, int64_t stride_bytes) {
  return (reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(stride_bytes)) % 16 == 0;
}

MLA_HOST_DEVICE bool rows_aligned16(const CacheView& cache) {
  return aligned16(cache.data, cache.block_stride) && aligned16(cache.data, cache.row_stride);
}

// Loads kBytes from global memory to `to`, which is aligned to 16.
template <int kBytes, bool kAligned>
__device__ __forceinline__ void load_bytes(const void* from, void* to) {
  static_assert(kBytes % 16 == 0);
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) static_cast<uint8_t*>(to)[i] = static_cast<const uint8_t*>(from)[i];
  }
}

template <int kBytes, bool kAligned>
__device__ __forceinline__ void store_bytes(const void* from, void* to) {
  static_assert(kBytes % 4 == 0);
  if constexpr (kAligned && kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
  } else if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) static_cast<uint8_t*>(to)[i] = static_cast<const uint8_t*>(from)[i];
  }
}

}  // namespace mla::cuda
