// Which kernel computes an attention problem, and how many workers it wants.
#include <algorithm>
#include <atomic>

#include "cuda/attention/portable/config.h"
#include "cuda/common/launch.h"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

std::atomic<bool> portable_only{false};

int attribute(cudaDeviceAttr which) {
  int device, value;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&value, which, device), "device");
  return value;
}

bool is_hopper(int major) {
#ifdef MLA_CUDA_SM90A
  return major == 9;
#else
  return false;
#endif
}

// The Hopper kernels read and write in 16-byte pieces, count them in 32 bits, and decode one kind of row.
bool suits_hopper_kernels(const AttentionProblem& p) {
  for (int i = 0; i < p.list_count; ++i) {
    const CacheView& cache = p.lists[i].cache;
    if (cache.format.code != p.lists[0].cache.format.code || !rows_aligned16(cache) || cache.block_size > INT32_MAX)
      return false;
    if (cache.block_stride < 0 || cache.row_stride < 0 ||
        (cache.blocks * cache.block_stride + cache.block_size * cache.row_stride) / 16 >= UINT32_MAX)
      return false;
  }
  const auto aligned = [](const uint16_t* base, int64_t token, int64_t head) {
    return aligned16(base, 2 * token) && aligned16(base, 2 * head);
  };
  return aligned(p.q_nope, p.q_nope_token, p.q_nope_head) && aligned(p.q_rope, p.q_rope_token, p.q_rope_head) &&
         aligned(p.out, p.out_token, p.out_head);
}

enum class Kernel { portable, few_heads, many_heads };

Kernel choose_kernel(int major, int heads) {
  if (is_hopper(major) && !portable_only) return heads <= 16 ? Kernel::few_heads : Kernel::many_heads;
  return Kernel::portable;
}

}  // namespace

void sparse_attention(const AttentionProblem& p, void* stream) {
  Kernel kernel = choose_kernel(attribute(cudaDevAttrComputeCapabilityMajor), p.heads);
  if (!suits_hopper_kernels(p)) kernel = Kernel::portable;
  switch (kernel) {
#ifdef MLA_CUDA_SM90A
    case Kernel::few_heads:
      few_heads_attention(p, stream);
      break;
    case Kernel::many_heads:
      many_heads_attention(p, stream);
      break;
#endif
    default:
      portable_attention(p, stream);
  }
  merge_cut_tokens(p, stream);
}

int default_workers(int major, int processors, int heads) {
  const auto workers = [&](int heads_per_block, int blocks_per_processor) {
    const int blocks = (heads + heads_per_block - 1) / heads_per_block;
    return std::max(1, processors * blocks_per_processor / blocks);
  };
  switch (choose_kernel(major, heads)) {
    case Kernel::few_heads:
      return workers(16, 1);
    case Kernel::many_heads:
      return workers(64, 1);
    default:
      return workers(portable::kHeads, portable::kBlocksPerProcessor);
  }
}

bool select_kernel(const std::string& name) {
  if (name != "auto" && name != "portable") return false;
  portable_only = name == "portable";
  return true;
}

}  // namespace mla::cuda
