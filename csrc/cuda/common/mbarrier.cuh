// Barriers in shared memory, which threads arrive at without waiting, and named barriers, which they wait at.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace mla::cuda {

using Barrier = cutlass::arch::ClusterBarrier;

// What a warp's arrival counts. One lane arrives for all; but compute-sanitizer's racecheck takes that for an arrival
// of what this lane alone has done, so in the library that it is shown every lane arrives for itself.
#ifdef MLA_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// A warp's arrival, after all that its lanes have done.
__device__ __forceinline__ void arrive_as_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kWarpArrivals) {
    barrier.arrive();
    compiler_fence();
  }
}

// Until the phase of this parity is complete; right after init() the phase before, of parity 1, counts as such. Ours,
// as CUTLASS's wait() sleeps between tries, and a loop around its try_wait() costs registers, which are spilled.
__device__ __forceinline__ void wait(Barrier& barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(cast_smem_ptr_to_uint(&barrier)),
      "r"(parity)
      : "memory");
}

// The thread arrives at a barrier when all cp.async that it has begun are there.
__device__ __forceinline__ void arrive_when_copied(Barrier& barrier) {
  cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<const uint64_t*>(&barrier));
}

// Named barriers are ours, too: CUTLASS's take fixed numbers for itself, clobber no memory and have no vote. Barrier 0
// is __syncthreads.
template <int kThreads>
__device__ __forceinline__ void sync_named(int barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The same, and tells all threads whether `vote` holds for any.
template <int kThreads>
__device__ __forceinline__ bool sync_named_or(int barrier, bool vote) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.s32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred all, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<int>(vote)), "r"(barrier), "n"(kThreads)
      : "memory");
  return any != 0;
}

// What has been stored to shared memory, by this thread or by threads whose arrival it has waited for, becomes visible
// to the wgmmas that it issues; and to another thread's, once that has waited for this one. It waits for the thread's
// own loads too, so threads that have loads under way leave it to those who wait for them.
__device__ __forceinline__ void fence_async_shared() {
  compiler_fence();
  cutlass::arch::fence_view_async_shared();
}

// The warp's number, so that the compiler knows it to be the same for all lanes.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

}  // namespace mla::cuda
