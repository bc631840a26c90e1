// Which kernel computes an attention problem, and how many workers it wants.
#include <algorithm>
#include <atomic>

#include "cuda/attention/portable/config.h"
#include "cuda/common/launch.h"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

enum class Selection { automatic, portable, unclustered };

std::atomic<Selection> selection{Selection::automatic};

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

constexpr int64_t kManyTokens = INT32_MAX;

enum class Kernel { portable, few_heads, few_heads_wide, many_heads };

// Whether the GPU holds so many blocks for every token at once, each of them a cluster of so many for the token's
// parts. A cluster lies within one of the GPU's partitions, and not all of these are whole; what is left over was
// counted on an H200.
bool clusters_fit(int processors, int64_t tokens, int blocks, int parts) {
  const int left_over = parts == 2   ? 0
                        : parts == 3 ? processors / 9
                        : parts == 6 ? processors * 3 / 13
                                     : processors / 11;
  return tokens > 0 && std::min<int64_t>(tokens, processors) * blocks * parts <= processors - left_over;
}

// How the kernel for few heads spreads few tokens over all processors.
struct Spread {
  int heads;  // of a block
  int parts;  // into which every token had best be cut, so that one cluster of as many blocks merges them; 0: none
};

// Eight heads a block where there is room for twice as many blocks: what is done for a token before and after its
// tiles, half of such a launch, is done for half as many.
Spread spread_of(int processors, int64_t tokens, int heads) {
  const auto fit = [&](int heads_of_block, int parts) {
    return clusters_fit(processors, tokens, (heads + heads_of_block - 1) / heads_of_block, parts);
  };
  for (const int parts : {16, 8})
    if (fit(8, parts)) return {8, parts};
  const int heads_of_block = heads <= 8 ? 8 : 16;
  for (const int parts : {8, 6, 4, 3, 2})
    if (fit(heads_of_block, parts)) return {heads_of_block, parts};
  return {heads_of_block, 0};
}

// Of the kernel for few heads. A plan of the caller's may have more rows than there is room for blocks of eight heads.
int heads_of_block(const AttentionProblem& p, int processors, int64_t tokens) {
  const Spread spread = spread_of(processors, tokens, p.heads);
  const bool crowded = int64_t{p.workers} * ((p.heads + 7) / 8) > processors;
  return p.heads > 8 && crowded ? 16 : spread.heads;
}

Kernel choose_kernel(int major, int processors, int64_t tokens, int heads, Code code) {
  if (!is_hopper(major) || selection == Selection::portable) return Kernel::portable;
  // few tokens of many heads are spread over more processors by 16 heads at a time, or eight
  if (heads <= 16 || spread_of(processors, tokens, heads).parts) return Kernel::few_heads;
  return heads <= 32 && code == Code::e4m3 ? Kernel::few_heads_wide : Kernel::many_heads;
}

}  // namespace

void sparse_attention(const AttentionProblem& p, void* stream) {
  // a token's bits must not depend on how many others there are where that was asked for
  const int64_t tokens = p.whole_tokens ? kManyTokens : p.tokens;
  const int processors = attribute(cudaDevAttrMultiProcessorCount);
  Kernel kernel = choose_kernel(attribute(cudaDevAttrComputeCapabilityMajor), processors, tokens, p.heads,
                                p.lists[0].cache.format.code);
  if (!suits_hopper_kernels(p)) kernel = Kernel::portable;
  switch (kernel) {
#ifdef MLA_CUDA_SM90A
    case Kernel::few_heads:  // merges what the plan cut itself
      return few_heads_attention(p, stream, heads_of_block(p, processors, tokens), selection != Selection::unclustered);
    case Kernel::few_heads_wide:
      few_heads_wide_attention(p, stream);
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

int default_workers(int major, int processors, int64_t tokens, int heads) {
  const auto workers = [&](int heads_per_block, int blocks_per_processor) {
    const int blocks = (heads + heads_per_block - 1) / heads_per_block;
    return std::max(1, processors * blocks_per_processor / blocks);
  };
  // whatever the format: a block has all of 17 to 32 heads in either kernel for them
  switch (choose_kernel(major, processors, tokens, heads, Code::bf16)) {
    case Kernel::few_heads:
      if (const int parts = spread_of(processors, tokens, heads).parts) return static_cast<int>(tokens) * parts;
      return workers(16, 1);
    case Kernel::many_heads:
      return workers(64, 1);
    default:
      return workers(portable::kHeads, portable::kBlocksPerProcessor);
  }
}

bool select_kernel(const std::string& name) {
  if (name == "auto")
    selection = Selection::automatic;
  else if (name == "portable")
    selection = Selection::portable;
  else if (name == "unclustered")
    selection = Selection::unclustered;
  else
    return false;
  return true;
}

}  // namespace mla::cuda
