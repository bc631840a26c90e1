// Kernel launches, and the lists of kernels that `mla-backend doctor` reports on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mla::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears it, or the next launch would report it again
  throw std::runtime_error(std::string("mla_backend: ") + what + ": " + cudaGetErrorString(error));
}

// A kernel needs permission for more than 48 KB of shared memory.
inline cudaError_t allow_shared(const void* kernel, int dynamic_shared_bytes) {
  if (dynamic_shared_bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_shared_bytes);
}

inline cudaLaunchAttribute clustered(dim3 ctas) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = ctas.x, cluster.val.clusterDim.y = ctas.y, cluster.val.clusterDim.z = ctas.z;
  return cluster;
}

// Enqueues a kernel whose only argument is its problem. `attributes` are those of cudaLaunchConfig_t.
template <typename Problem>
void launch(void (*kernel)(Problem), dim3 grid, int threads, int dynamic_shared_bytes, void* stream, const char* what,
            const Problem& problem, cudaLaunchAttribute* attributes = nullptr, int attribute_count = 0) {
  const void* function = reinterpret_cast<const void*>(kernel);
  void* arguments[] = {const_cast<Problem*>(&problem)};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = dynamic_shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = attribute_count;
  check(allow_shared(function, dynamic_shared_bytes), what);
  check(cudaLaunchKernelExC(&config, function, arguments), what);
}

// The same in clusters of CTAs, and the kernel may begin before the one before it has ended: it calls
// pdl_wait (common/order.cuh) before it touches what others write or read.
template <typename Problem>
void launch_pdl(void (*kernel)(Problem), dim3 grid, int threads, int dynamic_shared_bytes, void* stream,
                const char* what, const Problem& problem, dim3 cluster = dim3(1)) {
  cudaLaunchAttribute attributes[2]{{}, clustered(cluster)};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  const bool alone = cluster.x * cluster.y * cluster.z == 1;
  launch(kernel, grid, threads, dynamic_shared_bytes, stream, what, problem, attributes, alone ? 1 : 2);
}

// One kernel of the library, for `mla-backend doctor`.
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

// A chain of all .cu files' lists. Each file's list joins it before main() begins.
struct ListedKernels {
  KernelList (*list)();
  ListedKernels* next;
  static inline ListedKernels* first = nullptr;
  explicit ListedKernels(KernelList (*list)()) : list(list), next(first) { first = this; }
};

// Opens the definition of the function that returns a file's kernels.
#define MLA_KERNELS                             \
  static KernelList listed_kernels();           \
  static ListedKernels listing{listed_kernels}; \
  static KernelList listed_kernels()

}  // namespace mla::cuda
