#include "cuda/attention/sm90/some_heads/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {

using namespace sm90::some_heads;

void some_heads_attention(const AttentionProblem& p, void* stream) {
  const dim3 blocks((p.heads + kHeads - 1) / kHeads, p.workers);
  launch_early(p.max_logits ? attention_kernel<true> : attention_kernel<false>, blocks, kThreads, sizeof(Shared),
               stream, "sparse_attention", p);
}

KernelList some_heads_attention_kernels() {
  static const KernelEntry entries[] = {
      {"sparse_attention sm90, 32 heads, fp8_ds_mla", reinterpret_cast<const void*>(attention_kernel<false>), kThreads,
       sizeof(Shared)},
      {"sparse_attention sm90, 32 heads, fp8_ds_mla, largest scores",
       reinterpret_cast<const void*>(attention_kernel<true>), kThreads, sizeof(Shared)}};
  return {entries, 2};
}

}  // namespace mla::cuda
