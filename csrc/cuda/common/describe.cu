#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {

std::string describe_kernels() {
  std::string json;
  for (const ListedKernels* listed = ListedKernels::first; listed; listed = listed->next) {
    const KernelList list = listed->list();
    for (int i = 0; i < list.count; ++i) {
      const KernelEntry& kernel = list.entries[i];
      json += json.empty() ? "" : ",";
      json += std::string("{\"name\":\"") + kernel.name + "\"";
      cudaFuncAttributes attributes;
      int ctas = 0;
      cudaError_t error = cudaFuncGetAttributes(&attributes, kernel.function);
      if (error == cudaSuccess) error = allow_shared(kernel.function, kernel.dynamic_shared_bytes);
      if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel.function, kernel.threads,
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
              ",\"ctas_per_sm\":" + std::to_string(ctas) +
              ",\"binary_version\":" + std::to_string(attributes.binaryVersion) + "}";
    }
  }
  return "[" + json + "]";
}

}  // namespace mla::cuda
