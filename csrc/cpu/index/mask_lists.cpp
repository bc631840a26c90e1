#include "cpu/common/parallel.h"
#include "mla/ops.h"

namespace mla::cpu {

void mask_lists(const MaskListsProblem& p) {
  for_each_in_ranges(p.tokens, 16, [&](int64_t i) {
    const MaskRow row(p, p.first + i);
    int32_t* slots = p.slots + i * p.slot_stride;
    int32_t length = 0;
    for (int32_t block = 0; block < p.kv_blocks; ++block) {
      if (row.blocks[block] == kBlockUnseen) continue;
      const int32_t begin = block * p.kv_block, left = p.positions - begin;
      const int32_t words = ((p.kv_block < left ? p.kv_block : left) + 31) / 32;
      for (int32_t word = 0; word < words; ++word) {
        const int32_t position = begin + 32 * word;
        for (uint32_t seen = row.seen(p, block, word, position); seen; seen &= seen - 1, ++length)
          if (length < p.topk) slots[length] = row.slot(p, position + __builtin_ctz(seen));
      }
    }
    p.lengths[i] = length;
  });
}

}  // namespace mla::cpu
