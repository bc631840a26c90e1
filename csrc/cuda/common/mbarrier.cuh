// mbarriers (in shared memory; threads arrive without waiting) and named barriers (threads wait).
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace mla::cuda {

using Barrier = cutlass::arch::ClusterBarrier;

// Arrivals per warp. One lane arrives for all. But compute-sanitizer's racecheck would order only that lane's accesses,
// so every lane arrives in the library that is built for it.
#ifdef MLA_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// The warp arrives, after everything that its lanes did before.
__device__ __forceinline__ void arrive_as_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kWarpArrivals) {
    barrier.arrive();
    compiler_fence();
  }
}

// The thread arrives, and the phase is complete only when this many bytes have come from bulk copies, too.
__device__ __forceinline__ void arrive_and_expect(Barrier& barrier, uint32_t bytes) {
  cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(reinterpret_cast<const uint64_t*>(&barrier), bytes);
}

// Waits until the phase of this parity is complete. Right after init(), parity 1 counts as complete. Ours, because
// CUTLASS's wait() sleeps between tries, and a loop around its try_wait() costs registers and spills.
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

// The thread arrives once all its cp.async so far have completed.
__device__ __forceinline__ void arrive_when_copied(Barrier& barrier) {
  cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<const uint64_t*>(&barrier));
}

// Named barriers are ours, too: CUTLASS's reserves numbers for itself, clobbers no memory and has no vote. Barrier 0 is
// __syncthreads.
template <int kThreads>
__device__ __forceinline__ void sync_named(int barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The same with a vote: tells all threads whether any of them has `vote`.
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

// fence.proxy.async: makes stores to shared memory visible to wgmma, and orders them before bulk copies to the same
// place. It covers stores of this thread and of threads whose arrival it has waited for, and wgmmas of this thread and
// of threads that wait for it. It also waits for the thread's own loads, so a thread with loads in flight leaves it to
// those who wait for it.
__device__ __forceinline__ void fence_async_shared() {
  compiler_fence();
  cutlass::arch::fence_view_async_shared();
}

// The warp's index, by a shuffle: then the compiler knows that it is uniform.
__device__ __forceinline__ int warp_of_cta() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0); }

}  // namespace mla::cuda
