#include <algorithm>

#include "bindings/op.h"

namespace mla::bindings {

MLA_OP(mask_lists, Tensor blocks, Tensor bits, int64_t q_block, int64_t kv_block, int64_t queries, int64_t positions,
       int64_t first, bool list_full, OptionalTensor block_table, int64_t page_size, Written slots, Written lengths) {
  MaskListsProblem p{};
  p.q_block = expect_range(q_block, "q_block", 1, kMaxSize);
  p.kv_block = expect_range(kv_block, "kv_block", 1, kMaxSize);
  p.queries = expect_range(queries, "queries", 0, kMaxMaskPositions);
  p.positions = expect_range(positions, "positions", 0, kMaxMaskPositions);
  p.pages.block_size = expect_range(page_size, "page_size", 1, kMaxSize);
  p.list_full = list_full;
  p.q_blocks = static_cast<int32_t>(ceil_div(queries, q_block));
  p.kv_blocks = static_cast<int32_t>(ceil_div(positions, kv_block));

  p.blocks =
      expect<int32_t>(blocks, "blocks", {{"B"}, {"H"}, {"q_blocks", p.q_blocks}, {"kv_blocks", p.kv_blocks}}, blocks);
  p.batches = blocks.size(0), p.heads = blocks.size(1);
  if (p.batches == 0 || p.heads == 0) reject("blocks", "contiguous, with B and H of 1 or more", describe(blocks));
  const int64_t bit_rows = std::min(queries, q_block), bit_words = ceil_div(std::min(positions, kv_block), 32);
  p.bits = reinterpret_cast<const uint32_t*>(
      expect<int32_t>(bits, "bits", {{"numbered blocks"}, bit_rows, bit_words}, blocks));
  p.bit_blocks = expect_int32(bits.size(0), "bits", "blocks");
  p.bit_rows = static_cast<int32_t>(bit_rows), p.bit_words = static_cast<int32_t>(bit_words);

  p.lengths = expect<int32_t>(lengths, "lengths", {{"T"}}, blocks);
  p.tokens = expect_int32(lengths.size(0), "lengths", "tokens");
  p.slots = expect<int32_t>(slots, "slots", {{"T", p.tokens}, {"topk"}}, blocks, {&p.slot_stride});
  p.topk = expect_int32(slots.size(1), "slots", "slots a token");
  p.first = expect_range(first, "first", 0, kMaxSize - p.tokens);
  if (p.tokens > 0 && queries == 0) reject("lengths", "int32 [0] without queries", describe(lengths));
  if (p.tokens == 0) return;
  // of the tokens' batch elements, one more than the last
  const int64_t elements = ceil_div(first + p.tokens, queries * p.heads);
  if (p.batches != 1 && elements > p.batches)
    reject("first", "of tokens within the mask's " + std::to_string(p.batches) + " batch elements",
           std::to_string(first) + " and " + std::to_string(p.tokens) + " tokens");
  if (block_table) {
    p.pages = expect_block_table(*block_table, "block_table", page_size, "page_size", blocks);
    if (p.pages.requests < elements)
      reject("block_table", "int32 [B, max_blocks] with B of " + std::to_string(elements) + " or more",
             describe(*block_table));
  } else if (elements * positions > kMaxSize) {
    reject("positions", "of at most " + std::to_string(kMaxSize) + " rows in all batch elements",
           std::to_string(elements * positions));
  }
  MLA_RUN(blocks, mask_lists, p);
}

}  // namespace mla::bindings
