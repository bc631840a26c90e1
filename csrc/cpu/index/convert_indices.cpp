#include "cpu/common/parallel.h"
#include "mla/ops.h"

namespace mla::cpu {

void convert_indices(const ConvertProblem& p) {
  for_each_in_ranges(p.tokens, 4, [&](int64_t token) {
    const int32_t* positions = p.positions + token * p.position_stride;
    int32_t* slots = p.slots + token * p.slot_stride;
    const int64_t request = p.request[token];
    int32_t valid = 0;
    for (int32_t i = 0; i < p.topk; ++i) {
      const int32_t slot = slot_of_position(p, request, positions[i]);
      if (!p.compact) slots[i] = slot;
      if (slot < 0) continue;
      if (p.compact) slots[valid] = slot;
      ++valid;
    }
    for (int32_t i = valid; p.compact && i < p.topk; ++i) slots[i] = -1;
    if (p.counts) p.counts[token] = valid;
  });
}

}  // namespace mla::cpu
