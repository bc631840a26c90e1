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
    uint32_t worst;
    if (count > p.topk) {
      if (p.topk > 0)
        taken = take_best(p.scores + token * p.score_token, count, p.topk, buffer, worst,
                          [&](int32_t n, int32_t i) { chosen[n] = i; });
    } else {
      for (; taken < count; ++taken) chosen[taken] = taken;
    }
    std::fill(chosen + taken, chosen + p.topk, -1);
  });
}

}  // namespace mla::cpu
