// The order of kernels where one is launched before the one before it has ended (launch_early in common/launch.h). A
// no-op where the architecture has no such thing, and then the launch is an ordinary one. And the order of what blocks
// of one kernel tell one another through memory.
#pragma once

namespace mla::cuda {

// Until the kernels before this one have ended and all that they wrote can be seen.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start where there is room. It still waits for this kernel's end before it reads.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Between what a thread writes for other blocks and the count that tells them of it, and between that count and what
// they read.
__device__ __forceinline__ void fence_of_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace mla::cuda
