#include "cuda/attention/portable/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {

void portable_attention(const AttentionProblem& p, void* stream) {
  const dim3 blocks((p.heads + portable::kHeads - 1) / portable::kHeads, p.workers);
  launch(portable::attention_kernel, blocks, portable::kThreads, sizeof(portable::Shared), stream, "sparse_attention",
         p);
}

KernelList portable_attention_kernels() {
  static const KernelEntry entries[] = {{"sparse_attention portable",
                                         reinterpret_cast<const void*>(portable::attention_kernel), portable::kThreads,
                                         sizeof(portable::Shared)}};
  return {entries, 1};
}

}  // namespace mla::cuda
