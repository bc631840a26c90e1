#include "cuda/attention/grid.h"
#include "cuda/attention/sm90/few_heads/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::few_heads;
using sm90::Rows;

cudaLaunchAttribute clustered(int blocks) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 1, cluster.val.clusterDim.y = blocks, cluster.val.clusterDim.z = 1;
  return cluster;
}

// Clusters of more than 8 blocks have to be asked for.
void allow_cluster(const void* kernel, int blocks) {
  if (blocks > 8)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "sparse_attention");
}

// Max logits cost registers and, at a token's end, shuffles, so they are found only where they are asked for.
using Kernel = void (*)(AttentionProblem);
template <Rows kRows, int kHeads>
Kernel kernel_for(const AttentionProblem& p) {
  return p.max_logits ? attention_kernel<kRows, kHeads, true> : attention_kernel<kRows, kHeads, false>;
}

template <Rows kRows, int kHeads>
void run(const AttentionProblem& p, const Choice& choice, void* stream) {
  const Kernel kernel = kernel_for<kRows, kHeads>(p);
  allow_cluster(reinterpret_cast<const void*>(kernel), choice.cluster);
  dim3 blocks = attention_grid(p, choice);
  blocks.y = (blocks.y + choice.cluster - 1) / choice.cluster * choice.cluster;
  cudaLaunchAttribute attributes[2]{clustered(choice.cluster), {}};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  launch(kernel, blocks, kThreads, kSharedBytes<kRows, kHeads>, stream, "sparse_attention", p, attributes, 2);
}

template <Rows kRows>
void run(const AttentionProblem& p, const Choice& choice, void* stream) {
  choice.heads_per_block == 8 ? run<kRows, 8>(p, choice, stream) : run<kRows, 16>(p, choice, stream);
}

template <Rows kRows, int kHeads, bool kMaxLogits = false>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kRows, kHeads, kMaxLogits>), kThreads,
          kSharedBytes<kRows, kHeads>};
}

}  // namespace

void few_heads_attention(const AttentionProblem& p, const Choice& choice, void* stream) {
  sm90::with_rows_of(p, [&](auto rows) { run<rows.value>(p, choice, stream); });
}

void few_heads_wide_attention(const AttentionProblem& p, const Choice& choice, void* stream) {
  launch_early(kernel_for<Rows::fp8_ds_mla, kWideHeads>(p), attention_grid(p, choice), kThreads,
               kSharedBytes<Rows::fp8_ds_mla, kWideHeads>, stream, "sparse_attention", p);
}

// A cluster lies within one of the GPU's partitions, which may differ in size, so only the driver knows. A block takes
// all registers of a multiprocessor, whatever its heads and rows are: one form of the kernel answers for all.
int few_heads_clusters(int blocks) {
  static_assert(kThreads * kRegisters == 64 * 1024);
  const auto kernel = reinterpret_cast<const void*>(attention_kernel<Rows::fp8_ds_mla, 16, false>);
  const std::string what = "clusters of " + std::to_string(blocks) + " blocks";
  constexpr int kBytes = kSharedBytes<Rows::fp8_ds_mla, 16>;
  check(allow_shared(kernel, kBytes), what.c_str());
  allow_cluster(kernel, blocks);
  cudaLaunchAttribute cluster = clustered(blocks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1, blocks);
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
      entry<Rows::fp8_ds_mla, 8>("sparse_attention sm90, 8 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, 8, true>("sparse_attention sm90, 8 heads, fp8_ds_mla, max logits"),
      entry<Rows::fp8_ds_mla, 16>("sparse_attention sm90, 16 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, 16, true>("sparse_attention sm90, 16 heads, fp8_ds_mla, max logits"),
      entry<Rows::fp8_ds_mla, 32>("sparse_attention sm90, 32 heads, fp8_ds_mla"),
      entry<Rows::fp8_ds_mla, 32, true>("sparse_attention sm90, 32 heads, fp8_ds_mla, max logits"),
      entry<Rows::bf16, 8>("sparse_attention sm90, 8 heads, bf16"),
      entry<Rows::bf16, 8, true>("sparse_attention sm90, 8 heads, bf16, max logits"),
      entry<Rows::bf16, 16>("sparse_attention sm90, 16 heads, bf16"),
      entry<Rows::bf16, 16, true>("sparse_attention sm90, 16 heads, bf16, max logits"),
      entry<Rows::fp16, 8>("sparse_attention sm90, 8 heads, fp16"),
      entry<Rows::fp16, 8, true>("sparse_attention sm90, 8 heads, fp16, max logits"),
      entry<Rows::fp16, 16>("sparse_attention sm90, 16 heads, fp16"),
      entry<Rows::fp16, 16, true>("sparse_attention sm90, 16 heads, fp16, max logits"),
      entry<Rows::fp8_tensor_576, 8>("sparse_attention sm90, 8 heads, fp8_tensor_576"),
      entry<Rows::fp8_tensor_576, 8, true>("sparse_attention sm90, 8 heads, fp8_tensor_576, max logits"),
      entry<Rows::fp8_tensor_576, 16>("sparse_attention sm90, 16 heads, fp8_tensor_576"),
      entry<Rows::fp8_tensor_576, 16, true>("sparse_attention sm90, 16 heads, fp8_tensor_576, max logits"),
      entry<Rows::any_512, 8>("sparse_attention sm90, 8 heads, rows of 512"),
      entry<Rows::any_512, 8, true>("sparse_attention sm90, 8 heads, rows of 512, max logits"),
      entry<Rows::any_512, 16>("sparse_attention sm90, 16 heads, rows of 512"),
      entry<Rows::any_512, 16, true>("sparse_attention sm90, 16 heads, rows of 512, max logits")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
