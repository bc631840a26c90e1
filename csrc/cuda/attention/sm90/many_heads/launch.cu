#include "cuda/attention/grid.h"
#include "cuda/attention/sm90/many_heads/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::many_heads;
using sm90::Rows;

static_assert(kHeads == kManyHeads && sm90::kTileTokens == kGpuTileSlots);

template <Rows kRows>
void run(const AttentionProblem& p, const Choice& choice, void* stream) {
  launch_early(p.max_logits ? attention_kernel<kRows, true> : attention_kernel<kRows, false>, attention_grid(p, choice),
               kThreads, sizeof(Shared<kRows>), stream, "sparse_attention", p);
}

template <Rows kRows, bool kMaxLogits = false>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kRows, kMaxLogits>), kThreads, sizeof(Shared<kRows>)};
}

}  // namespace

void many_heads_attention(const AttentionProblem& p, const Choice& choice, void* stream) {
  sm90::with_rows_of(p, [&](auto rows) { run<rows.value>(p, choice, stream); });
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      entry<Rows::fp8_ds_mla>("sparse_attention sm90, 64 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, true>("sparse_attention sm90, 64 heads, fp8_ds_mla, max logits"),
      entry<Rows::bf16>("sparse_attention sm90, 64 heads, bf16"),
      entry<Rows::bf16, true>("sparse_attention sm90, 64 heads, bf16, max logits"),
      entry<Rows::fp16>("sparse_attention sm90, 64 heads, fp16"),
      entry<Rows::fp16, true>("sparse_attention sm90, 64 heads, fp16, max logits"),
      entry<Rows::fp8_tensor_576>("sparse_attention sm90, 64 heads, fp8_tensor_576"),
      entry<Rows::fp8_tensor_576, true>("sparse_attention sm90, 64 heads, fp8_tensor_576, max logits"),
      entry<Rows::any_512>("sparse_attention sm90, 64 heads, rows of 512"),
      entry<Rows::any_512, true>("sparse_attention sm90, 64 heads, rows of 512, max logits")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
