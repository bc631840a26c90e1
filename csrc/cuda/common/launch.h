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

// Enqueues a kernel whose one argument is its problem. `attributes` are those of cudaLaunchConfig_t.
template <typename Problem>
void launch(void (*kernel)(Problem), dim3 blocks, int threads, int dynamic_shared_bytes, void* stream, const char* what,
            const Problem& problem, cudaLaunchAttribute* attributes = nullptr, int attribute_count = 0) {
  const void* function = reinterpret_cast<const void*>(kernel);
  void* arguments[] = {const_cast<Problem*>(&problem)};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = dynamic_shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = attribute_count;
  check(allow_shared(function, dynamic_shared_bytes), what);
  check(cudaLaunchKernelExC(&config, function, arguments), what);
}

// The same, and the kernel may begin before the one before it has ended: it calls wait_for_kernel_before
// (common/order.cuh) before it touches what others write or read.
template <typename Problem>
void launch_early(void (*kernel)(Problem), dim3 blocks, int threads, int dynamic_shared_bytes, void* stream,
                  const char* what, const Problem& problem) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch(kernel, blocks, threads, dynamic_shared_bytes, stream, what, problem, &early, 1);
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
KernelList many_heads_attention_kernels();
KernelList plan_kernels();
KernelList merge_kernels();
KernelList cache_write_kernels();
KernelList cache_gather_kernels();
KernelList convert_indices_kernels();
KernelList index_scores_kernels();
KernelList select_top_kernels();

}  // namespace mla::cuda
