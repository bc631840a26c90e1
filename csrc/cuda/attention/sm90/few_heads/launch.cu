#include <algorithm>
#include <atomic>

#include "cuda/attention/sm90/few_heads/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::few_heads;

cudaLaunchAttribute clustered(int blocks) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = 1, cluster.val.clusterDim.y = blocks, cluster.val.clusterDim.z = 1;
  return cluster;
}

// Largest scores cost registers and, at a token's end, shuffles, so they are found only where they are asked for.
using Kernel = void (*)(AttentionProblem);
template <Code kCode, int kHeads>
Kernel kernel_for(const AttentionProblem& p) {
  return p.max_logits ? attention_kernel<kCode, kHeads, true> : attention_kernel<kCode, kHeads, false>;
}

constexpr int kMostInCluster = 16, kFewestInCluster = 2;  // more than 8 has to be asked for

// How many clusters of so many blocks the GPU holds at once: their blocks share a part of the GPU, so not all
// processors can be used. Both kernels take the same room.
template <Code kCode, int kHeads>
int clusters_at_once(int blocks) {
  static std::atomic<int> known[64][kMostInCluster + 1];
  int device;
  check(cudaGetDevice(&device), "device");
  std::atomic<int>* const entry = device < 64 ? &known[device][blocks] : nullptr;
  if (entry && *entry > 0) return *entry - 1;
  const void* const kernels[] = {reinterpret_cast<const void*>(attention_kernel<kCode, kHeads, false>),
                                 reinterpret_cast<const void*>(attention_kernel<kCode, kHeads, true>)};
  cudaLaunchAttribute cluster = clustered(blocks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1, blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes<kCode, kHeads>;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count;
  for (const void* kernel : kernels) {
    check(allow_shared(kernel, kSharedBytes<kCode, kHeads>), "sparse_attention");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "sparse_attention");
  }
  if (cudaOccupancyMaxActiveClusters(&count, kernels[0], &config) != cudaSuccess) {
    cudaGetLastError();  // a GPU, or a part of one, that has no such clusters
    count = 0;
  }
  if (entry) *entry = count + 1;
  return count;
}

// A cluster for each token, where the plan cuts every token into as many parts as a cluster can have blocks; else a
// large one, which merges more on the way, where all workers that can have work find room in such.
template <Code kCode, int kHeads>
int cluster_of(const AttentionProblem& p) {
  int64_t tiles = 0;
  for (int i = 0; i < p.list_count; ++i) tiles += tiles_of(p.lists[i].topk, sm90::kTileTokens);
  const int64_t busy = std::min<int64_t>(p.workers, p.tokens * tiles) * ((p.heads + kHeads - 1) / kHeads);
  const auto fits = [&](int blocks) { return busy <= int64_t{blocks} * clusters_at_once<kCode, kHeads>(blocks); };
  const int64_t parts = p.workers / std::max<int64_t>(p.tokens, 1);
  if (parts * p.tokens == p.workers && parts >= kFewestInCluster && parts <= kMostInCluster && fits(parts))
    return static_cast<int>(parts);
  return fits(8) ? 8 : kFewestInCluster;
}

template <Code kCode, int kHeads>
void run(const AttentionProblem& p, void* stream, bool clusters) {
  const int cluster = clusters ? cluster_of<kCode, kHeads>(p) : 1;
  const dim3 blocks((p.heads + kHeads - 1) / kHeads, (p.workers + cluster - 1) / cluster * cluster);
  cudaLaunchAttribute attributes[2]{clustered(cluster), {}};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  launch(kernel_for<kCode, kHeads>(p), blocks, kThreads, kSharedBytes<kCode, kHeads>, stream, "sparse_attention", p,
         attributes, 2);
}

template <Code kCode, int kHeads, bool kLargest = false>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(attention_kernel<kCode, kHeads, kLargest>), kThreads,
          kSharedBytes<kCode, kHeads>};
}

}  // namespace

void few_heads_attention(const AttentionProblem& p, void* stream, int heads_of_block, bool clusters) {
  const bool codes = p.lists[0].cache.format.code == Code::e4m3;
  if (heads_of_block == 8)
    codes ? run<Code::e4m3, 8>(p, stream, clusters) : run<Code::bf16, 8>(p, stream, clusters);
  else
    codes ? run<Code::e4m3, 16>(p, stream, clusters) : run<Code::bf16, 16>(p, stream, clusters);
}

void few_heads_wide_attention(const AttentionProblem& p, void* stream) {
  const dim3 blocks((p.heads + 31) / 32, p.workers);
  launch_early(kernel_for<Code::e4m3, 32>(p), blocks, kThreads, kSharedBytes<Code::e4m3, 32>, stream,
               "sparse_attention", p);
}

KernelList few_heads_attention_kernels() {
  static const KernelEntry entries[] = {
      entry<Code::e4m3, 8>("sparse_attention sm90, 8 heads, fp8_ds_mla"),
      entry<Code::e4m3, 8, true>("sparse_attention sm90, 8 heads, fp8_ds_mla, largest scores"),
      entry<Code::e4m3, 16>("sparse_attention sm90, 16 heads, fp8_ds_mla"),
      entry<Code::e4m3, 16, true>("sparse_attention sm90, 16 heads, fp8_ds_mla, largest scores"),
      entry<Code::e4m3, 32>("sparse_attention sm90, 32 heads, fp8_ds_mla"),
      entry<Code::e4m3, 32, true>("sparse_attention sm90, 32 heads, fp8_ds_mla, largest scores"),
      entry<Code::bf16, 8>("sparse_attention sm90, 8 heads, bf16"),
      entry<Code::bf16, 8, true>("sparse_attention sm90, 8 heads, bf16, largest scores"),
      entry<Code::bf16, 16>("sparse_attention sm90, 16 heads, bf16"),
      entry<Code::bf16, 16, true>("sparse_attention sm90, 16 heads, bf16, largest scores")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
