#include "cuda/attention/sm90/few_heads/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::few_heads;

template <Code kCode, int kHeads>
void run(const AttentionProblem& p, void* stream) {
  const dim3 blocks((p.heads + kHeads - 1) / kHeads, p.workers);
  launch_early(attention_kernel<kCode, kHeads>, blocks, Roles<kCode>::kThreads, kSharedBytes<kCode, kHeads>, stream,
               "sparse_attention", p);
}

template <Code kCode, int kHeads>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kCode, kHeads>), Roles<kCode>::kThreads,
          kSharedBytes<kCode, kHeads>};
}

}  // namespace

void few_heads_attention(const AttentionProblem& p, void* stream) {
  const bool codes = p.lists[0].cache.format.code == Code::e4m3;
  if (p.heads <= 8)
    codes ? run<Code::e4m3, 8>(p, stream) : run<Code::bf16, 8>(p, stream);
  else
    codes ? run<Code::e4m3, 16>(p, stream) : run<Code::bf16, 16>(p, stream);
}

KernelList few_heads_attention_kernels() {
  static const KernelEntry entries[] = {entry<Code::e4m3, 8>("sparse_attention sm90, 8 heads, fp8_ds_mla"),
                                        entry<Code::e4m3, 16>("sparse_attention sm90, 16 heads, fp8_ds_mla"),
                                        entry<Code::bf16, 8>("sparse_attention sm90, 8 heads, bf16"),
                                        entry<Code::bf16, 16>("sparse_attention sm90, 16 heads, bf16")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
