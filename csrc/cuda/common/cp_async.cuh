// cp.async: copies from global to shared memory that hold no registers while in flight.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm80.hpp>

#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"

namespace mla::cuda {

// Ours, because CUTLASS's zero-filling copies make L2 prefetch 128 bytes: rows of 656 bytes would drag in neighbours.
//
// Copies 16 bytes past L1. Unless `valid` it writes zeros and reads nothing.
__device__ __forceinline__ void copy_16_or_zero(uint32_t to_shared, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

// The same with 8 bytes, through L1: cp.async bypasses it with 16 bytes only.
__device__ __forceinline__ void copy_8_or_zero(uint32_t to_shared, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to_shared), "l"(from), "r"(valid ? 8 : 0)
               : "memory");
}

// The same with 4 bytes.
__device__ __forceinline__ void copy_4_or_zero(uint32_t to_shared, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to_shared), "l"(from), "r"(valid ? 4 : 0)
               : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Copies a multiple of 16 bytes. The barrier counts them as they come.
__device__ __forceinline__ void copy_bulk(uint32_t to_shared, const void* from, uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to_shared),
      "l"(from), "r"(bytes), "r"(cast_smem_ptr_to_uint(&barrier))
      : "memory");
}
#endif

// The copies that the thread has started since the last call become a group.
__device__ __forceinline__ void close_copies() { cute::cp_async_fence(); }

// Waits for all of the thread's groups but the last kUnderWay. Only this thread sees them then.
template <int kUnderWay>
__device__ __forceinline__ void wait_for_copies() {
  cute::cp_async_wait<kUnderWay>();
  compiler_fence();
}

}  // namespace mla::cuda
