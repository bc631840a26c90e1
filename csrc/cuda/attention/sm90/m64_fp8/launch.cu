#include "cuda/attention/grid.h"
#include "cuda/attention/sm90/m64_fp8/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::m64_fp8;
using sm90::Form;
using sm90::Rows;

static_assert(kHeads == 64 && sm90::kTileTokens == kGpuTileSlots);

template <Rows kRows, Form kForm>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kRows, kForm>), kThreads, sizeof(Shared<kRows>)};
}

}  // namespace

void m64_fp8_attention(const AttentionProblem& p, const Launch& launch, void* stream) {
  const auto start = [&](auto rows, auto form) {
    launch_pdl(attention_kernel<rows.value, form.value>, attention_grid(p, launch), kThreads,
               sizeof(Shared<rows.value>), stream, "sparse_attention", p);
    combine_split_tokens(p, false, stream);
  };
  if (p.tile == TileType::scaled_576)
    sm90::with_sparse_form_of(p, std::integral_constant<Rows, Rows::fp8_ds_mla>{}, start);
  else
    sm90::with_sparse_form_of(p, std::integral_constant<Rows, Rows::fp8_tensor_576>{}, start);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      entry<Rows::fp8_ds_mla, Form::sparse>("sparse_attention sm90, FP8 products, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, Form::sparse_max_logits>("sparse_attention sm90, FP8 products, fp8_ds_mla, max logits"),
      entry<Rows::fp8_tensor_576, Form::sparse>("sparse_attention sm90, FP8 products, fp8_tensor_576"),
      entry<Rows::fp8_tensor_576, Form::sparse_max_logits>(
          "sparse_attention sm90, FP8 products, fp8_tensor_576, max logits")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
