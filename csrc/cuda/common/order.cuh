// The order of kernels where one is launched before the one before it has ended (launch_pdl in common/launch.h). A
// no-op where the architecture has no such thing, and then the launch is an ordinary one. And the order of what blocks
// of one kernel tell one another through memory.
#pragma once

#include <cstdint>

namespace mla::cuda {

// Until the kernels before this one have ended and all that they wrote can be seen.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start where there is room. It still waits for this kernel's end before it reads.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Between what a thread writes for other blocks and the count that tells them of it, and between that count and what
// they read.
__device__ __forceinline__ void fence_of_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Brings a kernel's argument close, while a block waits for the kernel before it: constant memory takes as long as any
// other to come, 64 bytes at a time. Returns what the compiler cannot do without, if it is kept.
template <typename Argument>
__device__ __forceinline__ uint32_t touch(const Argument& argument) {
  const auto* words = reinterpret_cast<const uint32_t*>(&argument);
  uint32_t all = 0;
#pragma unroll
  for (uint32_t i = 0; i < sizeof(Argument) / 4; i += 16) all ^= words[i];
  return all;
}

}  // namespace mla::cuda
