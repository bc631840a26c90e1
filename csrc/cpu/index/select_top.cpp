// The top-k of each token's scores.
#include <algorithm>

#include "cpu/common/kept_buffer.h"
#include "cpu/common/parallel.h"
#include "cpu/index/top.h"
#include "mla/ops.h"

namespace mla::cpu {

void select_top(const SelectTopProblem& p) {
  for_each_in_ranges(p.tokens, 1, [&](int64_t token) {
    thread_local KeptBuffer buffer;
    int32_t* chosen = p.chosen + token * p.chosen_token;
    const int32_t count = std::max(0, std::min(p.length[token], p.positions));
    int32_t taken = 0;
    if (count > p.topk && p.topk > 0) {
      const float* scores = p.scores + token * p.score_token;
      const Threshold last = kth_largest(scores, count, p.topk, buffer);
      taken = take_best(scores, count, p.topk, last, [&](int32_t n, int32_t i) { chosen[n] = i; });
    } else if (count <= p.topk) {
      for (; taken < count; ++taken) chosen[taken] = taken;
    }
    std::fill(chosen + taken, chosen + p.topk, -1);
  });
}

}  // namespace mla::cpu
