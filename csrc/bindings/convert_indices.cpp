#include "bindings/op.h"

namespace mla::bindings {

MLA_OP(convert_indices, Tensor positions, Tensor block_table, Tensor request_ids, SymInt block_size, bool compact,
       SymInt ranks, SymInt rank, SymInt interleave, Written slots, Written counts) {
  ConvertProblem p{};
  p.positions = expect<int32_t>(positions, "positions", {{"T"}, {"topk"}}, positions, {&p.position_stride});
  p.tokens = positions.size(0);
  p.topk = expect_int32(positions.size(1), "positions", "positions a token");
  const Dim T{"T", p.tokens};
  p.table = expect_block_table(block_table, "block_table", block_size, "block_size", positions);
  p.request = expect<int32_t>(request_ids, "request_ids", {T}, positions);
  p.ranks = expect_range(ranks, "ranks", 1, kMaxSize);
  p.rank = expect_range(rank, "rank", 0, ranks - 1);
  p.interleave = expect_range(interleave, "interleave", 1, kMaxSize);
  p.compact = compact;
  p.slots = expect<int32_t>(slots, "slots", {T, {"topk", p.topk}}, positions, {&p.slot_stride});
  p.counts = expect<int32_t>(counts, "counts", {T}, positions);
  if (p.tokens == 0) return;
  MLA_RUN(positions, convert_indices, p);
}

}  // namespace mla::bindings
