// Launching, and the list of kernels that `mla-backend doctor` reports on.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace mla::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("mla_backend: ") + what + ": " + cudaGetErrorString(error));
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
