// Launching, and the list of kernels that `mla-backend doctor` reports on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mla::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("mla_backend: ") + what + ": " + cudaGetErrorString(error));
}

// A block gets more than 48 KB of shared memory only where that was asked for.
inline cudaError_t allow_shared(const void* kernel, int dynamic_shared_bytes) {
  if (dynamic_shared_bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_shared_bytes);
}

// Enqueues a kernel whose one argument is its problem.
template <typename Problem>
void launch(void (*kernel)(Problem), dim3 blocks, int threads, int dynamic_shared_bytes, void* stream, const char* what,
            const Problem& problem) {
  const void* function = reinterpret_cast<const void*>(kernel);
  void* arguments[] = {const_cast<Problem*>(&problem)};
  check(allow_shared(function, dynamic_shared_bytes), what);
  check(cudaLaunchKernel(function, blocks, dim3(threads), arguments, dynamic_shared_bytes,
                         static_cast<cudaStream_t>(stream)),
        what);
}

// One kernel of the library. Each .cu file defines the list of its own.
struct KernelEntry {
  const char* name;
  const void* function;
  int threads;
  int dynamic_shared_bytes;
};

struct KernelList {
  const KernelEntry* entries;
  int count;
};

KernelList portable_attention_kernels();
KernelList few_heads_attention_kernels();
KernelList plan_kernels();
KernelList merge_kernels();
KernelList cache_write_kernels();
KernelList cache_gather_kernels();
KernelList convert_indices_kernels();

}  // namespace mla::cuda
