#include <algorithm>

#include "bindings/op.h"
#include "mla/limits.h"

namespace mla::bindings {
namespace {

int64_t blocks_of(int64_t positions, int64_t block) { return (positions + block - 1) / block; }

}  // namespace

MLA_OP(mask_lists,
       "(Tensor blocks, Tensor bits, int q_block, int kv_block, int queries, int positions, int first, bool list_full, "
       "Tensor? block_table, int page_size, Tensor(a!) slots, Tensor(b!) lengths) -> ()",
       Tensor blocks, Tensor bits, int64_t q_block, int64_t kv_block, int64_t queries, int64_t positions, int64_t first,
       bool list_full, OptionalTensor block_table, int64_t page_size, Tensor slots, Tensor lengths) {
  MaskListsProblem p{};
  p.q_block = expect_range(q_block, "q_block", 1, kMaxSize);
  p.kv_block = expect_range(kv_block, "kv_block", 1, kMaxSize);
  p.queries = expect_range(queries, "queries", 0, kMaxMaskPositions);
  p.positions = expect_range(positions, "positions", 0, kMaxMaskPositions);
  p.page_size = expect_range(page_size, "page_size", 1, kMaxSize);
  p.list_full = list_full;
  const int64_t q_blocks = blocks_of(queries, q_block), kv_blocks = blocks_of(positions, kv_block);
  p.q_blocks = static_cast<int32_t>(q_blocks), p.kv_blocks = static_cast<int32_t>(kv_blocks);

  expect(blocks, "blocks", {ScalarType::Int}, {{"B"}, {"H"}, {"q_blocks", q_blocks}, {"kv_blocks", kv_blocks}}, blocks);
  if (blocks.size(0) == 0 || blocks.size(1) == 0 || !blocks.is_contiguous())
    reject("blocks", "contiguous, with B and H of 1 or more", describe(blocks));
  p.batches = blocks.size(0), p.heads = blocks.size(1);
  p.blocks = data<const int32_t>(blocks);
  expect(bits, "bits", {ScalarType::Int},
         {{"numbered blocks"}, std::min(queries, q_block), blocks_of(std::min(positions, kv_block), 32)}, blocks);
  if (!bits.is_contiguous()) reject("bits", "contiguous", describe(bits) + " that is not");
  p.bit_blocks = expect_int32(bits.size(0), "bits", "blocks");
  p.bit_rows = static_cast<int32_t>(bits.size(1)), p.bit_words = static_cast<int32_t>(bits.size(2));
  p.bits = data<const uint32_t>(bits);

  expect(lengths, "lengths", {ScalarType::Int}, {{"T"}}, blocks);
  p.tokens = lengths.size(0);
  expect(slots, "slots", {ScalarType::Int}, {{"T", p.tokens}, {"topk"}}, blocks);
  p.slots = data<int32_t>(slots), p.slot_stride = stride_of(slots, 0);
  p.topk = expect_int32(slots.size(1), "slots", "slots a token");
  p.lengths = data<int32_t>(lengths);

  expect_int32(p.tokens, "lengths", "tokens");
  p.first = expect_range(first, "first", 0, kMaxSize - p.tokens);
  if (p.tokens > 0 && queries == 0) reject("lengths", "int32 [0] without queries", describe(lengths));
  if (p.tokens == 0) return;
  // of the tokens' batch elements, one more than the last
  const int64_t elements = blocks_of(first + p.tokens, queries * p.heads);
  if (p.batches != 1 && elements > p.batches)
    reject("first", "of tokens within the mask's " + std::to_string(p.batches) + " batch elements",
           std::to_string(first) + " and " + std::to_string(p.tokens) + " tokens");
  if (block_table) {
    expect(*block_table, "block_table", {ScalarType::Int}, {{"B"}, {"max_blocks"}}, blocks);
    if (block_table->size(0) < elements)
      reject("block_table", "int32 [B, max_blocks] with B of " + std::to_string(elements) + " or more",
             describe(*block_table));
    p.block_table = data<const int32_t>(*block_table), p.table_stride = stride_of(*block_table, 0);
    p.max_blocks = expect_int32(block_table->size(1), "block_table", "blocks a request");
  } else if (elements * positions > kMaxSize) {
    reject("positions", "of at most " + std::to_string(kMaxSize) + " rows in all batch elements",
           std::to_string(elements * positions));
  }
  MLA_RUN(blocks, mask_lists, p);
}

}  // namespace mla::bindings
