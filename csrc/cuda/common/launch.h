// Launching, and the list of kernels that `mla-backend doctor` reports on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mla::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("mla_backend: ") + what + ": " + cudaGetErrorString(error));
}

// Enqueues a kernel whose one argument is its problem.
template <typename Problem>
void launch(void (*kernel)(Problem), int64_t blocks, int threads, int dynamic_shared_bytes, void* stream, const char* what,
            const Problem& problem) {
  void* arguments[] = {const_cast<Problem*>(&problem)};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)), dim3(threads), arguments,
                         dynamic_shared_bytes, static_cast<cudaStream_t>(stream)),
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

KernelList cache_write_kernels();
KernelList cache_gather_kernels();

}  // namespace mla::cuda
