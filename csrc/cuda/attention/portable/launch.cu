#include "cuda/attention/grid.h"
#include "cuda/attention/portable/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {

static_assert(portable::kHeads == kPortableHeads && portable::kCtasPerProcessor == kPortableCtasPerProcessor &&
              portable::kTile == kGpuTileSlots);

void portable_attention(const AttentionProblem& p, const Launch& how, void* stream) {
  const auto kernel =
      p.tile == TileType::f16_576 ? portable::attention_kernel<Number::f16> : portable::attention_kernel<Number::bf16>;
  launch(kernel, attention_grid(p, how), portable::kThreads, sizeof(portable::Shared), stream, "sparse_attention", p);
  combine_split_tokens(p, false, stream);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"sparse_attention portable", reinterpret_cast<const void*>(portable::attention_kernel<Number::bf16>),
       portable::kThreads, sizeof(portable::Shared)},
      {"sparse_attention portable, fp16", reinterpret_cast<const void*>(portable::attention_kernel<Number::f16>),
       portable::kThreads, sizeof(portable::Shared)}};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
