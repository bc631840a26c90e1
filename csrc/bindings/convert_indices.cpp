#include "bindings/op.h"
#include "mla/limits.h"

namespace mla::bindings {

MLA_OP(convert_indices,
       "(Tensor positions, Tensor block_table, Tensor request_ids, SymInt block_size, bool compact, "
       "SymInt ranks, SymInt rank, SymInt interleave, Tensor(a!) slots, Tensor(b!) counts) -> ()",
       Tensor positions, Tensor block_table, Tensor request_ids, int64_t block_size, bool compact, int64_t ranks,
       int64_t rank, int64_t interleave, Tensor slots, Tensor counts) {
  expect(positions, "positions", {ScalarType::Int}, {{"T"}, {"topk"}}, positions);
  const int64_t tokens = positions.size(0), topk = positions.size(1);
  expect(block_table, "block_table", {ScalarType::Int}, {{"R"}, {"max_blocks"}}, positions);
  expect(request_ids, "request_ids", {ScalarType::Int}, {{"T", tokens}}, positions);
  expect(slots, "slots", {ScalarType::Int}, {{"T", tokens}, {"topk", topk}}, positions);
  expect(counts, "counts", {ScalarType::Int}, {{"T", tokens}}, positions);

  ConvertProblem p{};
  p.tokens = tokens;
  p.topk = expect_int32(topk, "positions", "positions a token");
  p.positions = data<const int32_t>(positions), p.position_stride = stride_of(positions, 0);
  p.table.blocks = data<const int32_t>(block_table), p.table.stride = stride_of(block_table, 0);
  p.table.requests = block_table.size(0);
  p.table.max_blocks = expect_int32(block_table.size(1), "block_table", "blocks a request");
  p.table.block_size = expect_range(block_size, "block_size", 1, kMaxSize);
  p.request = data<const int32_t>(request_ids);
  p.ranks = expect_range(ranks, "ranks", 1, kMaxSize);
  p.rank = expect_range(rank, "rank", 0, ranks - 1);
  p.interleave = expect_range(interleave, "interleave", 1, kMaxSize);
  p.compact = compact;
  p.slots = data<int32_t>(slots), p.slot_stride = stride_of(slots, 0);
  p.counts = data<int32_t>(counts);
  if (tokens == 0) return;
  MLA_RUN(positions, convert_indices, p);
}

}  // namespace mla::bindings
