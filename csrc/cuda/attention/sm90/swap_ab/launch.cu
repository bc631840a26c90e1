#include "cuda/attention/grid.h"
#include "cuda/attention/sm90/swap_ab/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::swap_ab;
using sm90::Form;
using sm90::Rows;

// Clusters of more than 8 CTAs have to be asked for.
void allow_cluster(const void* kernel, int ctas) {
  if (ctas > 8)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "sparse_attention");
}

using Kernel = void (*)(AttentionProblem);

void run(Kernel kernel, int shared_bytes, const AttentionProblem& p, const Launch& launch, void* stream) {
  allow_cluster(reinterpret_cast<const void*>(kernel), launch.cluster);
  dim3 grid = attention_grid(p, launch);
  grid.y = (grid.y + launch.cluster - 1) / launch.cluster * launch.cluster;
  launch_pdl(kernel, grid, kThreads, shared_bytes, stream, "sparse_attention", p, dim3(1, launch.cluster));
}

template <Rows kRows, int kHeads, Form kForm>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kRows, kHeads, kForm>), kThreads,
          kSharedBytes<kRows, kHeads>};
}

}  // namespace

void swap_ab_attention(const AttentionProblem& p, const Launch& launch, void* stream) {
  if (launch.heads_per_cta > 16) {
    const auto start = [&](auto rows, auto form) {
      run(attention_kernel<rows.value, 32, form.value>, kSharedBytes<rows.value, 32>, p, launch, stream);
    };
    sm90::rows_of(p) == Rows::nvfp4_352
        ? sm90::with_form_of(p, std::integral_constant<Rows, Rows::nvfp4_352>{}, start)
        : sm90::with_form_of(p, std::integral_constant<Rows, Rows::fp8_ds_mla>{}, start);
    return combine_split_tokens(p, false, stream);
  }
  sm90::with_kernel_of(p, [&](auto rows, auto form) {
    launch.heads_per_cta == 8
        ? run(attention_kernel<rows.value, 8, form.value>, kSharedBytes<rows.value, 8>, p, launch, stream)
        : run(attention_kernel<rows.value, 16, form.value>, kSharedBytes<rows.value, 16>, p, launch, stream);
  });
}

// A cluster lies within one of the GPU's partitions, which may differ in size, so only the driver knows. A CTA takes
// all registers of a multiprocessor, whatever its heads and rows are: one form of the kernel answers for all.
int swap_ab_clusters(int ctas) {
  static_assert(kThreads * kRegisters == 64 * 1024);
  const auto kernel = reinterpret_cast<const void*>(attention_kernel<Rows::fp8_ds_mla, 16, Form::sparse>);
  const std::string what = "clusters of " + std::to_string(ctas) + " CTAs";
  constexpr int kBytes = kSharedBytes<Rows::fp8_ds_mla, 16>;
  check(allow_shared(kernel, kBytes), what.c_str());
  allow_cluster(kernel, ctas);
  cudaLaunchAttribute cluster = clustered(dim3(1, ctas));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1, ctas);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &config);
  if (error == cudaErrorInvalidClusterSize) {  // a part of a GPU that is too small for one
    cudaGetLastError();
    return 0;
  }
  check(error, what.c_str());
  return count;
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      entry<Rows::fp8_ds_mla, 8, Form::sparse>("sparse_attention sm90, 8 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, 8, Form::sparse_max_logits>("sparse_attention sm90, 8 heads, fp8_ds_mla, max logits"),
      entry<Rows::fp8_ds_mla, 8, Form::dense>("dense_attention sm90, 8 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, 16, Form::sparse>("sparse_attention sm90, 16 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, 16, Form::sparse_max_logits>("sparse_attention sm90, 16 heads, fp8_ds_mla, max logits"),
      entry<Rows::fp8_ds_mla, 16, Form::dense>("dense_attention sm90, 16 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, 32, Form::sparse>("sparse_attention sm90, 32 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, 32, Form::sparse_max_logits>("sparse_attention sm90, 32 heads, fp8_ds_mla, max logits"),
      entry<Rows::fp8_ds_mla, 32, Form::dense>("dense_attention sm90, 32 heads, fp8_ds_mla"),
      entry<Rows::bf16, 8, Form::sparse>("sparse_attention sm90, 8 heads, bf16"),
      entry<Rows::bf16, 8, Form::sparse_max_logits>("sparse_attention sm90, 8 heads, bf16, max logits"),
      entry<Rows::bf16, 8, Form::dense>("dense_attention sm90, 8 heads, bf16"),
      entry<Rows::bf16, 16, Form::sparse>("sparse_attention sm90, 16 heads, bf16"),
      entry<Rows::bf16, 16, Form::sparse_max_logits>("sparse_attention sm90, 16 heads, bf16, max logits"),
      entry<Rows::bf16, 16, Form::dense>("dense_attention sm90, 16 heads, bf16"),
      entry<Rows::fp16, 8, Form::sparse>("sparse_attention sm90, 8 heads, fp16"),
      entry<Rows::fp16, 8, Form::sparse_max_logits>("sparse_attention sm90, 8 heads, fp16, max logits"),
      entry<Rows::fp16, 8, Form::dense>("dense_attention sm90, 8 heads, fp16"),
      entry<Rows::fp16, 16, Form::sparse>("sparse_attention sm90, 16 heads, fp16"),
      entry<Rows::fp16, 16, Form::sparse_max_logits>("sparse_attention sm90, 16 heads, fp16, max logits"),
      entry<Rows::fp16, 16, Form::dense>("dense_attention sm90, 16 heads, fp16"),
      entry<Rows::fp8_tensor_576, 8, Form::sparse>("sparse_attention sm90, 8 heads, fp8_tensor_576"),
      entry<Rows::fp8_tensor_576, 8, Form::sparse_max_logits>(
          "sparse_attention sm90, 8 heads, fp8_tensor_576, max logits"),
      entry<Rows::fp8_tensor_576, 8, Form::dense>("dense_attention sm90, 8 heads, fp8_tensor_576"),
      entry<Rows::fp8_tensor_576, 16, Form::sparse>("sparse_attention sm90, 16 heads, fp8_tensor_576"),
      entry<Rows::fp8_tensor_576, 16, Form::sparse_max_logits>(
          "sparse_attention sm90, 16 heads, fp8_tensor_576, max logits"),
      entry<Rows::fp8_tensor_576, 16, Form::dense>("dense_attention sm90, 16 heads, fp8_tensor_576"),
      entry<Rows::nvfp4_352, 8, Form::sparse>("sparse_attention sm90, 8 heads, nvfp4_352"),
      entry<Rows::nvfp4_352, 8, Form::sparse_max_logits>("sparse_attention sm90, 8 heads, nvfp4_352, max logits"),
      entry<Rows::nvfp4_352, 8, Form::dense>("dense_attention sm90, 8 heads, nvfp4_352"),
      entry<Rows::nvfp4_352, 16, Form::sparse>("sparse_attention sm90, 16 heads, nvfp4_352"),
      entry<Rows::nvfp4_352, 16, Form::sparse_max_logits>("sparse_attention sm90, 16 heads, nvfp4_352, max logits"),
      entry<Rows::nvfp4_352, 16, Form::dense>("dense_attention sm90, 16 heads, nvfp4_352"),
      entry<Rows::nvfp4_352, 32, Form::sparse>("sparse_attention sm90, 32 heads, nvfp4_352"),
      entry<Rows::nvfp4_352, 32, Form::sparse_max_logits>("sparse_attention sm90, 32 heads, nvfp4_352, max logits"),
      entry<Rows::nvfp4_352, 32, Form::dense>("dense_attention sm90, 32 heads, nvfp4_352"),
      entry<Rows::any_512, 8, Form::sparse>("sparse_attention sm90, 8 heads, rows of 512"),
      entry<Rows::any_512, 8, Form::sparse_max_logits>("sparse_attention sm90, 8 heads, rows of 512, max logits"),
      entry<Rows::any_512, 8, Form::dense>("dense_attention sm90, 8 heads, rows of 512"),
      entry<Rows::any_512, 16, Form::sparse>("sparse_attention sm90, 16 heads, rows of 512"),
      entry<Rows::any_512, 16, Form::sparse_max_logits>("sparse_attention sm90, 16 heads, rows of 512, max logits"),
      entry<Rows::any_512, 16, Form::dense>("dense_attention sm90, 16 heads, rows of 512")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
