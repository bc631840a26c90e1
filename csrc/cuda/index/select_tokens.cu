// Scores and selections in one op. Where no kernel does both, index_scores and select_top follow one another, over as
// many tokens at a time as the workspace has room for: a row of scores each.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/index/sm90/select.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;

// The scores of the chosen, where wanted, and positions of their places in the tokens' lists.
struct GatherProblem {
  IndexProblem index;
  const float* scores;  // [tokens, positions]
  int64_t score_token;
  int32_t* chosen;  // [tokens, topk]
  int64_t chosen_token;
  int32_t topk;
  float* chosen_scores;  // [tokens, topk] or null
  int64_t chosen_score_token;
};

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherProblem p) {
  const int64_t token = blockIdx.x;
  const float* scores = p.scores + token * p.score_token;
  int32_t* chosen = p.chosen + token * p.chosen_token;
  for (int32_t i = threadIdx.x; i < p.topk; i += kThreads) {
    const int32_t place = chosen[i];
    if (p.chosen_scores) p.chosen_scores[token * p.chosen_score_token + i] = place < 0 ? -INFINITY : scores[place];
    if (place >= 0) chosen[i] = p.index.position_at(token, place);
  }
}

// Scores of a token. A context that is longer than topk has more columns than topk, so select_top knows that it is
// longer.
int64_t columns(const SelectTokensProblem& p) {
  const int64_t needed = std::max(p.positions, p.topk + 1);
  return (needed + 3) / 4 * 4;  // rows that begin at multiples of 16 bytes are read faster
}

constexpr int64_t kWorkspaceScores = kMaxSelectWorkspace / sizeof(float);
static_assert(kMaxSelectPositions <= kWorkspaceScores && kMaxSelected + 4 <= kWorkspaceScores, "a row always fits");

int64_t tokens_at_once(const SelectTokensProblem& p) { return std::min(p.tokens, kWorkspaceScores / columns(p)); }

int64_t portable_workspace_bytes(const SelectTokensProblem& p) {
  return tokens_at_once(p) * columns(p) * static_cast<int64_t>(sizeof(float));
}

void portable_select_tokens(const SelectTokensProblem& p, void* stream) {
  const int64_t at_once = tokens_at_once(p);
  for (int64_t first = 0; first < p.tokens; first += at_once) {
    const int64_t tokens = std::min(at_once, p.tokens - first);
    IndexScoresProblem scores{};
    static_cast<IndexProblem&>(scores) = p.piece(first, tokens);
    scores.scores = reinterpret_cast<float*>(p.workspace), scores.score_token = columns(p);
    scores.positions = std::max(p.positions, p.topk + 1);
    index_scores(scores, p.chosen_scores ? 0 : p.topk, stream);

    SelectTopProblem top{};
    top.tokens = tokens;
    top.scores = scores.scores, top.score_token = scores.score_token;
    top.positions = scores.positions;
    top.length = scores.length;
    top.topk = p.topk;
    top.chosen = p.chosen + first * p.chosen_token, top.chosen_token = p.chosen_token;
    select_top(top, stream);

    if (p.chosen_scores || p.candidate_blocks.size > 0) {
      const GatherProblem gather{scores,
                                 scores.scores,
                                 scores.score_token,
                                 top.chosen,
                                 top.chosen_token,
                                 p.topk,
                                 p.chosen_scores ? p.chosen_scores + first * p.chosen_score_token : nullptr,
                                 p.chosen_score_token};
      launch(gather_kernel, tokens, kThreads, 0, stream, "select_tokens", gather);
    }
  }
  if (p.slots.block_size == 0) return;
  ConvertProblem slots{};
  slots.tokens = p.tokens;
  slots.topk = p.topk;
  slots.positions = slots.slots = p.chosen;
  slots.position_stride = slots.slot_stride = p.chosen_token;
  slots.table = p.slots;
  slots.request = p.request;
  slots.ranks = slots.interleave = 1;
  convert_indices(slots, stream);
}

}  // namespace

// The number of tensors' bytes does not say which kernels can read them, so there is room for either.
int64_t select_workspace_bytes(const SelectTokensProblem& p, int device) {
  int64_t bytes = portable_workspace_bytes(p);
#ifdef MLA_CUDA_SM90A
  const Gpu gpu = describe_gpu(device);
  if (gpu.hopper) bytes = std::max(bytes, index::sm90::workspace_bytes(p, gpu.multiprocessors));
#endif
  return bytes;
}

void select_tokens(const SelectTokensProblem& p, void* stream) {
#ifdef MLA_CUDA_SM90A
  const Gpu gpu = describe_current_gpu();
  if (gpu.hopper && index::sm90::suits(p)) return index::sm90::select_tokens(p, gpu.multiprocessors, stream);
#endif
  portable_select_tokens(p, stream);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"select_tokens, scores of the chosen", reinterpret_cast<const void*>(gather_kernel), kThreads, 0}};
  return {entries, 1};
}

}  // namespace mla::cuda
