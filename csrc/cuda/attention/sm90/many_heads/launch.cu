#include "cuda/attention/sm90/many_heads/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::many_heads;

template <Code kCode>
void run(const AttentionProblem& p, void* stream) {
  const dim3 blocks((p.heads + kHeads - 1) / kHeads, p.workers);
  launch_early(p.max_logits ? attention_kernel<kCode, true> : attention_kernel<kCode, false>, blocks, kThreads,
               sizeof(Shared<kCode>), stream, "sparse_attention", p);
}

template <Code kCode, bool kLargest = false>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kCode, kLargest>), kThreads, sizeof(Shared<kCode>)};
}

}  // namespace

void many_heads_attention(const AttentionProblem& p, void* stream) {
  p.lists[0].cache.format.code == Code::e4m3 ? run<Code::e4m3>(p, stream) : run<Code::bf16>(p, stream);
}

KernelList many_heads_attention_kernels() {
  static const KernelEntry entries[] = {
      entry<Code::e4m3>("sparse_attention sm90, 64 heads, fp8_ds_mla"),
      entry<Code::e4m3, true>("sparse_attention sm90, 64 heads, fp8_ds_mla, largest scores"),
      entry<Code::bf16>("sparse_attention sm90, 64 heads, bf16"),
      entry<Code::bf16, true>("sparse_attention sm90, 64 heads, bf16, largest scores")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
