#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mla::cpu {
namespace {

// The physical slot of a position in a request's sequence, or -1.
int32_t to_slot(const ConvertProblem& p, int64_t request, int32_t position) {
  if (position < 0 || request < 0 || request >= p.requests) return -1;
  const int32_t place = position / p.block_size;
  if (place >= p.max_blocks) return -1;
  const int64_t block = p.block_table[request * p.table_stride + place];
  const int64_t slot = block * p.block_size + position % p.block_size;
  return block < 0 || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
}

}  // namespace

void convert_indices(const ConvertProblem& p) {
  for_each_stretch(p.tokens, 4, [&](int64_t token) {
    const int32_t* positions = p.positions + token * p.position_stride;
    int32_t* slots = p.slots + token * p.slot_stride;
    const int64_t request = p.request[token];
    int32_t valid = 0;
    for (int32_t i = 0; i < p.topk; ++i) {
      const int32_t slot = to_slot(p, request, positions[i]);
      if (!p.compact) slots[i] = slot;
      if (slot < 0) continue;
      if (p.compact) slots[valid] = slot;
      ++valid;
    }
    for (int32_t i = valid; p.compact && i < p.topk; ++i) slots[i] = -1;
    p.counts[token] = valid;
  });
}

}  // namespace mla::cpu
