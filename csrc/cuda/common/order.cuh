// Programmatic dependent launch (launch_pdl in common/launch.h): griddepcontrol, a no-op before sm_90, where launches
// are ordinary ones. And the fence between CTAs of one kernel that communicate through global memory.
#pragma once

#include <cstdint>

namespace mla::cuda {

// Waits until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's CTAs start where there is room. They still wait (pdl_wait) for this kernel's end.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Goes between the data that a thread writes for other CTAs and the counter that announces it; and, in those CTAs,
// between the counter and the data.
__device__ __forceinline__ void fence_of_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Loads a kernel's argument into the constant cache, line by line (64 bytes), while the CTA waits for the kernel before
// it. Store the result, or the compiler drops the loads.
template <typename Argument>
__device__ __forceinline__ uint32_t touch(const Argument& argument) {
  const auto* words = reinterpret_cast<const uint32_t*>(&argument);
  uint32_t all = 0;
#pragma unroll
  for (uint32_t i = 0; i < sizeof(Argument) / 4; i += 16) all ^= words[i];
  return all;
}

}  // namespace mla::cuda
