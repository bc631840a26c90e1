#include "cuda/attention/grid.h"
#include "cuda/attention/sm90/m64/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::m64;
using sm90::Form;
using sm90::Rows;

static_assert(kHeads == 64 && sm90::kTileTokens == kGpuTileSlots);

template <Rows kRows, Form kForm>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kRows, kForm>), kThreads, sizeof(Shared<kRows>)};
}

}  // namespace

void m64_attention(const AttentionProblem& p, const Launch& launch, void* stream) {
  const auto start = [&](auto rows, auto form) {
    launch_pdl(attention_kernel<rows.value, form.value>, attention_grid(p, launch), kThreads,
               sizeof(Shared<rows.value>), stream, "sparse_attention", p);
    combine_split_tokens(p, sm90::has_compact_splits(rows.value), stream);
  };
  if (p.tile == TileType::staged_576)
    sm90::with_sparse_form_of(p, std::integral_constant<Rows, Rows::staged>{}, start);
  else
    sm90::with_kernel_of(p, start);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      entry<Rows::fp8_ds_mla, Form::sparse>("sparse_attention sm90, 64 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, Form::sparse_max_logits>("sparse_attention sm90, 64 heads, fp8_ds_mla, max logits"),
      entry<Rows::fp8_ds_mla, Form::dense>("dense_attention sm90, 64 heads, fp8_ds_mla"),
      entry<Rows::staged, Form::sparse>("sparse_attention sm90, 64 heads, staged"),
      entry<Rows::staged, Form::sparse_max_logits>("sparse_attention sm90, 64 heads, staged, max logits"),
      entry<Rows::bf16, Form::sparse>("sparse_attention sm90, 64 heads, bf16"),
      entry<Rows::bf16, Form::sparse_max_logits>("sparse_attention sm90, 64 heads, bf16, max logits"),
      entry<Rows::bf16, Form::dense>("dense_attention sm90, 64 heads, bf16"),
      entry<Rows::fp16, Form::sparse>("sparse_attention sm90, 64 heads, fp16"),
      entry<Rows::fp16, Form::sparse_max_logits>("sparse_attention sm90, 64 heads, fp16, max logits"),
      entry<Rows::fp16, Form::dense>("dense_attention sm90, 64 heads, fp16"),
      entry<Rows::fp8_tensor_576, Form::sparse>("sparse_attention sm90, 64 heads, fp8_tensor_576"),
      entry<Rows::fp8_tensor_576, Form::sparse_max_logits>(
          "sparse_attention sm90, 64 heads, fp8_tensor_576, max logits"),
      entry<Rows::fp8_tensor_576, Form::dense>("dense_attention sm90, 64 heads, fp8_tensor_576"),
      entry<Rows::nvfp4_352, Form::sparse>("sparse_attention sm90, 64 heads, nvfp4_352"),
      entry<Rows::nvfp4_352, Form::sparse_max_logits>("sparse_attention sm90, 64 heads, nvfp4_352, max logits"),
      entry<Rows::nvfp4_352, Form::dense>("dense_attention sm90, 64 heads, nvfp4_352"),
      entry<Rows::any_512, Form::sparse>("sparse_attention sm90, 64 heads, rows of 512"),
      entry<Rows::any_512, Form::sparse_max_logits>("sparse_attention sm90, 64 heads, rows of 512, max logits"),
      entry<Rows::any_512, Form::dense>("dense_attention sm90, 64 heads, rows of 512")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
