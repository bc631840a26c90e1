// Copies from global to shared memory that need no register while they are under way.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace mla::cuda {

// 16 bytes, past the first-level cache; zeros unless `held`, and then nothing is read.
__device__ __forceinline__ void copy_16_or_zero(uint32_t to_shared, const void* from, bool held) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(held ? 16 : 0)
               : "memory");
}

// 4 bytes likewise, but through the first-level cache: nothing else is that small.
__device__ __forceinline__ void copy_4_or_zero(uint32_t to_shared, const void* from, bool held) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to_shared), "l"(from), "r"(held ? 4 : 0)
               : "memory");
}

// The copies that the thread has begun since the last time are a batch, even if there are none.
__device__ __forceinline__ void end_batch_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of the thread's batches but the last kUnderWay are there, for this thread to see.
template <int kUnderWay>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kUnderWay) : "memory");
}

// The thread arrives at a barrier when all copies that it has begun are there.
__device__ __forceinline__ void arrive_when_copied(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

}  // namespace mla::cuda
