// Copies from global to shared memory that need no register while they are under way.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm80.hpp>

#include "cuda/common/mma.cuh"

namespace mla::cuda {

// These two are ours: CUTLASS's zero-filling copies make L2 fetch 128 bytes, and a row of 656 would drag in its
// neighbours.
//
// 16 bytes, past the first-level cache; zeros unless `valid`, and then nothing is read.
__device__ __forceinline__ void copy_16_or_zero(uint32_t to_shared, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// 8 bytes likewise, but through the first-level cache: cp.async goes past it with 16 bytes only.
__device__ __forceinline__ void copy_8_or_zero(uint32_t to_shared, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to_shared), "l"(from), "r"(valid ? 8 : 0)
               : "memory");
}

// The same with 4 bytes.
__device__ __forceinline__ void copy_4_or_zero(uint32_t to_shared, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to_shared), "l"(from), "r"(valid ? 4 : 0)
               : "memory");
}

// What the thread has begun to copy becomes a group.
__device__ __forceinline__ void close_copies() { cute::cp_async_fence(); }

// Until all of the thread's groups but the last kUnderWay are there, for this thread to see.
template <int kUnderWay>
__device__ __forceinline__ void wait_for_copies() {
  cute::cp_async_wait<kUnderWay>();
  compiler_fence();
}

}  // namespace mla::cuda
