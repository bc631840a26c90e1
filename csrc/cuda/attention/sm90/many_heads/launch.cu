#include "cuda/attention/grid.h"
#include "cuda/attention/sm90/many_heads/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::many_heads;

static_assert(kHeads == kManyHeads && sm90::kTileTokens == kGpuTileSlots);

template <Code kCode>
void run(const AttentionProblem& p, const Choice& choice, void* stream) {
  launch_early(p.max_logits ? attention_kernel<kCode, true> : attention_kernel<kCode, false>, attention_grid(p, choice),
               kThreads, sizeof(Shared<kCode>), stream, "sparse_attention", p);
}

template <Code kCode, bool kMaxLogits = false>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kCode, kMaxLogits>), kThreads, sizeof(Shared<kCode>)};
}

}  // namespace

void many_heads_attention(const AttentionProblem& p, const Choice& choice, void* stream) {
  p.lists[0].cache.format.code == Code::e4m3 ? run<Code::e4m3>(p, choice, stream) : run<Code::bf16>(p, choice, stream);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      entry<Code::e4m3>("sparse_attention sm90, 64 heads, fp8_ds_mla"),
      entry<Code::e4m3, true>("sparse_attention sm90, 64 heads, fp8_ds_mla, max logits"),
      entry<Code::bf16>("sparse_attention sm90, 64 heads, bf16"),
      entry<Code::bf16, true>("sparse_attention sm90, 64 heads, bf16, max logits")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
