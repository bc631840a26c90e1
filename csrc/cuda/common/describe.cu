#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {

std::string describe_kernels() {
  std::string json;
  for (const KernelList& list : {portable_attention_kernels(),
#ifdef MLA_CUDA_SM90A
                                 few_heads_attention_kernels(), many_heads_attention_kernels(),
#endif
                                 plan_kernels(), merge_kernels(), cache_write_kernels(), cache_gather_kernels(),
                                 convert_indices_kernels(), index_scores_kernels(), select_top_kernels()}) {
    for (int i = 0; i < list.count; ++i) {
      const KernelEntry& kernel = list.entries[i];
      json += json.empty() ? "" : ",";
      json += std::string("{\"name\":\"") + kernel.name + "\"";
      cudaFuncAttributes attributes;
      int blocks = 0;
      cudaError_t error = cudaFuncGetAttributes(&attributes, kernel.function);
      if (error == cudaSuccess) error = allow_shared(kernel.function, kernel.dynamic_shared_bytes);
      if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel.function, kernel.threads,
                                                              kernel.dynamic_shared_bytes);
      if (error != cudaSuccess) {
        cudaGetLastError();  // a question must not leave an error behind for the next launch to trip over
        json += std::string(",\"error\":\"") + cudaGetErrorString(error) + "\"}";
        continue;
      }
      json += ",\"threads\":" + std::to_string(kernel.threads) +
              ",\"registers\":" + std::to_string(attributes.numRegs) +
              ",\"local_bytes\":" + std::to_string(attributes.localSizeBytes) +
              ",\"shared_bytes\":" + std::to_string(attributes.sharedSizeBytes + kernel.dynamic_shared_bytes) +
              ",\"blocks_per_sm\":" + std::to_string(blocks) +
              ",\"binary_version\":" + std::to_string(attributes.binaryVersion) + "}";
    }
  }
  return "[" + json + "]";
}

}  // namespace mla::cuda
