#include "cuda/index/scores.cuh"

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using index::Problem;

struct Variant {
  void (*kernel)(Problem);
  int shared_bytes;
};

template <KeyNumber kKeys, int kTokenTiles, int kPasses, bool kAligned = true>
Variant variant() {
  using Shared = index::Shared<kKeys, kPasses>;
  static_assert(sizeof(Shared) <= 99 * 1024, "what sm_89 and sm_120 let a block have");
  return {index::scores_kernel<kKeys, kTokenTiles, kPasses, kAligned>, sizeof(Shared)};
}

template <KeyNumber kKeys>
Variant choose(int heads, bool aligned = true) {
  if (!aligned) return variant<kKeys, 4, 2, false>();  // slow, for any number of heads
  if (heads <= 32) return variant<kKeys, 2, 1>();
  return heads <= 64 ? variant<kKeys, 4, 1>() : variant<kKeys, 4, 2>();
}

}  // namespace

void index_scores(const IndexScoresProblem& p, void* stream) { index_scores(p, 0, stream); }

void index_scores(const IndexScoresProblem& p, int32_t unscored, void* stream) {
  if (p.tokens == 0 || p.positions == 0) return;
  const int64_t most = int64_t{describe_current_gpu().multiprocessors} * index::kBlocksPerProcessor;
  const int64_t blocks = std::min(most, p.tokens * index::units_of(p.positions));
  // scales stand a multiple of 128 bytes behind a block's begin
  const bool aligned = aligned16(p.cache.data, p.cache.block_stride);
  const Variant chosen = p.cache.number == KeyNumber::e4m3    ? choose<KeyNumber::e4m3>(p.heads, aligned)
                         : p.cache.number == KeyNumber::mxfp4 ? choose<KeyNumber::mxfp4>(p.heads, aligned)
                                                              : choose<KeyNumber::bf16>(p.heads, aligned);
  launch(chosen.kernel, blocks, index::kThreads, chosen.shared_bytes, stream, "index_scores", Problem(p, unscored));
}

MLA_KERNELS {
  const auto entry = [](const char* name, Variant v) {
    return KernelEntry{name, reinterpret_cast<const void*>(v.kernel), index::kThreads, v.shared_bytes};
  };
  static const KernelEntry entries[] = {
      entry("index_scores fp8, up to 32 heads", choose<KeyNumber::e4m3>(32)),
      entry("index_scores fp8, up to 64 heads", choose<KeyNumber::e4m3>(64)),
      entry("index_scores fp8, more heads", choose<KeyNumber::e4m3>(128)),
      entry("index_scores fp8, unaligned", choose<KeyNumber::e4m3>(128, false)),
      entry("index_scores mxfp4, up to 32 heads", choose<KeyNumber::mxfp4>(32)),
      entry("index_scores mxfp4, up to 64 heads", choose<KeyNumber::mxfp4>(64)),
      entry("index_scores mxfp4, more heads", choose<KeyNumber::mxfp4>(128)),
      entry("index_scores mxfp4, unaligned", choose<KeyNumber::mxfp4>(128, false)),
      entry("index_scores bf16, up to 32 heads", choose<KeyNumber::bf16>(32)),
      entry("index_scores bf16, up to 64 heads", choose<KeyNumber::bf16>(64)),
      entry("index_scores bf16, more heads", choose<KeyNumber::bf16>(128)),
      entry("index_scores bf16, unaligned", choose<KeyNumber::bf16>(128, false)),
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
