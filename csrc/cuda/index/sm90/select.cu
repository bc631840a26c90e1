// Launches of the two kernels that select tokens.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/index/sm90/filter.cuh"
#include "cuda/index/sm90/finish.cuh"
#include "cuda/index/sm90/select.h"

namespace mla::cuda::index::sm90 {
namespace {

struct Variant {
  void (*kernel)(Problem);
  int group;
  int threads;
  int shared_bytes;
};

template <bool kMx, int kHeads, int kTokens>
Variant variant() {
  using Shared = FilterShared<kHeads, kTokens, kMx>;
  static_assert(sizeof(Shared) <= 113 * 1024, "two of a processor");
  return {filter_kernel<kHeads, kTokens, kMx>, kTokens, kFilterThreads<kTokens, kMx>, sizeof(Shared)};
}

template <bool kMx, int kHeads>
Variant by_tokens(int64_t per_request) {
  if constexpr (kHeads <= 64)
    if (per_request >= 4) return variant<kMx, kHeads, 4>();
  if (per_request >= 2) return variant<kMx, kHeads, 2>();
  return variant<kMx, kHeads, 1>();
}

template <bool kMx>
Variant choose(const SelectTokensProblem& p) {
  const int heads = p.heads;
  // Tokens with lists of candidates share no tiles.
  const int64_t per_request = p.candidate_blocks.size > 0 ? 1 : p.requests > 0 ? p.tokens / p.requests : p.tokens;
  if (heads <= 16) return by_tokens<kMx, 16>(per_request);
  if (heads <= 32) return by_tokens<kMx, 32>(per_request);
  if (heads <= 64) return by_tokens<kMx, 64>(per_request);
  return by_tokens<kMx, 128>(per_request);
}

// How the copy engine finds a tile of keys, or so many of them: in rows of 128 bytes, swizzled as wgmma wants them.
// False where it can't, as of a cache without blocks.
bool describe_keys(const KeyCacheView& cache, uint32_t keys, CUtensorMap& map) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "select_tokens");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const cuuint64_t sizes[] = {kIndexDim, static_cast<cuuint64_t>(cache.block_size),
                              static_cast<cuuint64_t>(std::max<int64_t>(cache.blocks, 1))};
  const int64_t stride = cache.blocks > 1 ? cache.block_stride : (cache.block_size * (kIndexDim + 4) + 15) / 16 * 16;
  const cuuint64_t strides[] = {kIndexDim, static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[] = {kIndexDim, keys, 1}, steps[] = {1, 1, 1};
  return encode && encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<uint8_t*>(cache.data), sizes, strides, box,
                          steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// CTAs that choose among a token's candidates: few tokens leave processors to share.
int cluster_of(int64_t tokens, int processors) {
  int cluster = kMaxCluster;
  while (cluster > 1 && cluster * tokens > processors) cluster /= 2;
  return cluster;
}

int64_t filter_ctas(int processors) { return std::min(processors * kCtasPerProcessor, kMaxCtas); }

// Candidates that a CTA of the last kernel has room for. Alone, four CTAs share a processor.
constexpr int kAloneThreads = 256, kAloneKept = 3584, kClusterThreads = 512, kClusterKept = 20480;

template <int kThreads>
int finish_bytes(int kept) {
  return static_cast<int>(sizeof(FinishShared<kThreads>)) + kept * static_cast<int>(sizeof(Candidate));
}

template <int kThreads>
void finish(const Problem& p, int cluster, void* stream) {
  const auto kernel = finish_kernel<kThreads>;
  launch_pdl(kernel, dim3(cluster, static_cast<unsigned>(p.tokens)), kThreads, finish_bytes<kThreads>(p.kept), stream,
             "select_tokens", p, dim3(cluster));
}

// How many tokens one launch of both kernels takes: what the workspace has room for, in equal pieces.
int64_t tokens_at_once(const SelectTokensProblem& p, int64_t ctas, int group) {
  const int64_t groups = (p.tokens + group - 1) / group;
  const int64_t most = kMaxSelectWorkspace / (kLists * list_bytes(p.topk) + 16) - ctas;
  const int64_t launches = (groups + most - 1) / most;
  return (groups + launches - 1) / launches * group;
}

}  // namespace

bool suits(const SelectTokensProblem& p) {
  const bool mx = p.cache.number == KeyNumber::mxfp4, fp8 = p.cache.number == KeyNumber::e4m3;
  return p.query_number == QueryNumber::e4m3 && (fp8 || (mx && p.candidate_blocks.size == 0)) &&
         aligned16(p.cache.data, p.cache.block_stride);
}

int64_t workspace_bytes(const SelectTokensProblem& p, int processors) {
  if (p.tokens == 0) return 0;
  int64_t most = 0;
  for (const int group : {1, 2, 4}) {
    const int64_t ctas = filter_ctas(processors), at_once = tokens_at_once(p, ctas, group);
    most = std::max(most, lists_bytes((at_once + group - 1) / group, ctas, p.topk));
  }
  return most;
}

void select_tokens(const SelectTokensProblem& p, int processors, void* stream) {
  const bool mx = p.cache.number == KeyNumber::mxfp4;
  const Variant v = (mx ? choose<true> : choose<false>)(p);
  const int64_t ctas = filter_ctas(processors), at_once = tokens_at_once(p, ctas, v.group);
  for (int64_t first = 0; first < p.tokens; first += at_once) {
    Problem piece(p);
    static_cast<IndexProblem&>(piece) = p.piece(first, std::min(at_once, p.tokens - first));
    piece.chosen += first * p.chosen_token;
    if (p.chosen_scores) piece.chosen_scores += first * p.chosen_score_token;
    const int together = p.candidate_blocks.size > 0 ? kUnitKeys : kTileKeys;
    piece.whole_tiles = piece.whole_tiles && (mx || describe_keys(p.cache, together, piece.keys));
    piece.group = v.group;
    piece.lists = lay_out(p.workspace, (piece.tokens + v.group - 1) / v.group, ctas, p.topk);
    const int cluster = cluster_of(piece.tokens, processors);
    piece.kept = cluster > 1 ? kClusterKept : kAloneKept;
    launch_pdl(v.kernel, dim3(ctas), v.threads, v.shared_bytes, stream, "select_tokens", piece);
    cluster > 1 ? finish<kClusterThreads>(piece, cluster, stream) : finish<kAloneThreads>(piece, 1, stream);
  }
}

}  // namespace mla::cuda::index::sm90

namespace mla::cuda {

MLA_KERNELS {
  using namespace index::sm90;
  const auto filter = [](const char* name, Variant v) {
    return KernelEntry{name, reinterpret_cast<const void*>(v.kernel), v.threads, v.shared_bytes};
  };
  static const KernelEntry entries[] = {
      filter("select_tokens sm90, 16 heads", variant<false, 16, 1>()),
      filter("select_tokens sm90, 32 heads", variant<false, 32, 1>()),
      filter("select_tokens sm90, 64 heads", variant<false, 64, 1>()),
      filter("select_tokens sm90, 64 heads, 4 tokens together", variant<false, 64, 4>()),
      filter("select_tokens sm90, 128 heads", variant<false, 128, 1>()),
      filter("select_tokens sm90, 128 heads, 2 tokens together", variant<false, 128, 2>()),
      filter("select_tokens sm90, MXFP4, 64 heads", variant<true, 64, 1>()),
      filter("select_tokens sm90, MXFP4, 64 heads, 4 tokens together", variant<true, 64, 4>()),
      filter("select_tokens sm90, MXFP4, 128 heads, 2 tokens together", variant<true, 128, 2>()),
      {"select_tokens sm90, the best", reinterpret_cast<const void*>(finish_kernel<kAloneThreads>), kAloneThreads,
       finish_bytes<kAloneThreads>(kAloneKept)},
      {"select_tokens sm90, the best, by a cluster", reinterpret_cast<const void*>(finish_kernel<kClusterThreads>),
       kClusterThreads, finish_bytes<kClusterThreads>(kClusterKept)},
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
