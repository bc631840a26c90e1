#include "bindings/op.h"
#include "mla/limits.h"

namespace mla::bindings {
namespace {

constexpr int64_t kQuantisedKeyBytes = kIndexDim + 4;

KeyCacheView expect_key_cache(const Tensor& cache, const char* name, const Tensor& same_device_as) {
  const char* accepted = "uint8 [blocks, block_size, 132] or bfloat16 [blocks, block_size, 128]";
  if (!cache.defined() || cache.dim() != 3) reject(name, accepted, describe(cache));
  const bool quantised = cache.scalar_type() == ScalarType::Byte;
  const int64_t width = quantised ? kQuantisedKeyBytes : kIndexDim;
  if ((!quantised && cache.scalar_type() != ScalarType::BFloat16) || cache.size(2) != width)
    reject(name, accepted, describe(cache));
  expect(cache, name, {cache.scalar_type()}, {{"blocks"}, {"block_size"}, width}, same_device_as);
  if (cache.size(1) == 0) reject(name, "of a block size of 1 or more", describe(cache));
  if (cache.size(1) > 1 && cache.stride(1) != width)
    reject(name, "of blocks that lie in one piece (stride " + std::to_string(width) + " in dimension 1)",
           "stride " + std::to_string(cache.stride(1)));
  const int64_t blocks = cache.size(0);  // one may have any stride, which is not multiplied
  const int64_t block_stride = blocks > 1 ? cache.stride(0) * (quantised ? 1 : 2) : 0;
  return {data<const uint8_t>(cache), blocks, cache.size(1), block_stride, quantised};
}

Rotations expect_rotations(const Tensor& cos_sin, const char* name, const Tensor& same_device_as) {
  expect(cos_sin, name, {ScalarType::Float, ScalarType::BFloat16}, {{"positions"}, kRope}, same_device_as);
  if (cos_sin.size(0) == 0) reject(name, "of 1 position or more", describe(cos_sin));
  return {cos_sin.data_ptr(), cos_sin.scalar_type() == ScalarType::Float, cos_sin.size(0), cos_sin.stride(0)};
}

// Queries, and the keys that they see. T and H of other arguments are those of `queries`.
IndexProblem expect_index(const Tensor& queries, const Tensor& weights, const Tensor& cache, const Tensor& block_table,
                          const Tensor& requests, const Tensor& lengths) {
  expect(queries, "queries", {ScalarType::Float, ScalarType::BFloat16, ScalarType::Float8_e4m3fn},
         {{"T"}, {"H"}, kIndexDim}, queries);
  const int64_t tokens = queries.size(0), heads = queries.size(1);
  if (heads < 1 || heads > kMaxIndexHeads)
    reject("queries", "of 1 to " + std::to_string(kMaxIndexHeads) + " heads", describe(queries));
  expect(weights, "weights", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, queries);
  expect(block_table, "block_table", {ScalarType::Int}, {{"R"}, {"max_blocks"}}, queries);
  expect(requests, "requests", {ScalarType::Int}, {{"T", tokens}}, queries);
  expect(lengths, "lengths", {ScalarType::Int}, {{"T", tokens}}, queries);

  IndexProblem p{};
  p.tokens = tokens;
  p.heads = static_cast<int32_t>(heads);
  p.queries = queries.data_ptr();
  p.query_number = queries.scalar_type() == ScalarType::Float      ? QueryNumber::fp32
                   : queries.scalar_type() == ScalarType::BFloat16 ? QueryNumber::bf16
                                                                   : QueryNumber::e4m3;
  p.query_token = queries.stride(0), p.query_head = queries.stride(1);
  p.weights = data<const float>(weights), p.weight_token = weights.stride(0);
  p.cache = expect_key_cache(cache, "cache", queries);
  p.block_table = data<const int32_t>(block_table), p.table_stride = stride_of(block_table, 0);
  p.requests = block_table.size(0);
  p.max_blocks = expect_int32(block_table.size(1), "block_table", "blocks a request");
  p.request = data<const int32_t>(requests);
  p.length = data<const int32_t>(lengths);
  return p;
}

int64_t workspace_bytes(const SelectTokensProblem& p, [[maybe_unused]] const Tensor& queries) {
#ifdef MLA_CUDA
  if (queries.is_cuda()) return cuda::select_workspace_bytes(p, queries.get_device_index());
#endif
  return cpu::select_workspace_bytes(p);
}

}  // namespace

MLA_OP(rotate_queries,
       "(Tensor queries, Tensor index_queries, Tensor weights, Tensor positions, Tensor cos_sin, Tensor index_cos_sin, "
       "float weight_scale, bool interleaved, Tensor(a!) out, Tensor(b!) index_out, Tensor(c!) weights_out) -> ()",
       Tensor queries, Tensor index_queries, Tensor weights, Tensor positions, Tensor cos_sin, Tensor index_cos_sin,
       double weight_scale, bool interleaved, Tensor out, Tensor index_out, Tensor weights_out) {
  expect(queries, "queries", {ScalarType::BFloat16}, {{"T"}, {"H"}, kRope}, queries);
  const int64_t tokens = queries.size(0), heads = queries.size(1);
  expect(index_queries, "index_queries", {ScalarType::BFloat16}, {{"T", tokens}, {"I"}, kIndexDim}, queries);
  const int64_t index_heads = index_queries.size(1);
  if (heads > kMaxHeads) reject("queries", "of up to " + std::to_string(kMaxHeads) + " heads", describe(queries));
  if (index_heads > kMaxIndexHeads)
    reject("index_queries", "of up to " + std::to_string(kMaxIndexHeads) + " heads", describe(index_queries));
  expect(weights, "weights", {ScalarType::Float, ScalarType::BFloat16}, {{"T", tokens}, {"I", index_heads}}, queries);
  expect(positions, "positions", {ScalarType::Long}, {{"T", tokens}}, queries);
  expect(out, "out", {ScalarType::BFloat16}, {{"T", tokens}, {"H", heads}, kRope}, queries);
  expect(index_out, "index_out", {ScalarType::Float8_e4m3fn, ScalarType::Byte},
         {{"T", tokens}, {"I", index_heads}, kIndexDim}, queries);
  expect(weights_out, "weights_out", {ScalarType::Float}, {{"T", tokens}, {"I", index_heads}}, queries);

  RotateQueriesProblem p{};
  p.tokens = tokens;
  p.heads = static_cast<int32_t>(heads), p.index_heads = static_cast<int32_t>(index_heads);
  p.queries = data<const uint16_t>(queries), p.query_token = queries.stride(0), p.query_head = queries.stride(1);
  p.index_queries = data<const uint16_t>(index_queries);
  p.index_token = index_queries.stride(0), p.index_head = index_queries.stride(1);
  p.interleaved = interleaved;
  p.weights = weights.data_ptr(), p.weights_fp32 = weights.scalar_type() == ScalarType::Float;
  p.weight_token = weights.stride(0), p.weight_scale = expect_finite(weight_scale, "weight_scale");
  p.position = data<const int64_t>(positions);
  p.rotations = expect_rotations(cos_sin, "cos_sin", queries);
  p.index_rotations = expect_rotations(index_cos_sin, "index_cos_sin", queries);
  p.out = data<uint16_t>(out), p.out_token = out.stride(0), p.out_head = out.stride(1);
  p.index_out = data<uint8_t>(index_out);
  p.index_out_token = index_out.stride(0), p.index_out_head = index_out.stride(1);
  p.weights_out = data<float>(weights_out), p.weight_out_token = weights_out.stride(0);
  if (tokens == 0 || heads + index_heads == 0) return;
  MLA_RUN(queries, rotate_queries, p);
}

MLA_OP(index_scores,
       "(Tensor queries, Tensor weights, Tensor cache, Tensor block_table, Tensor requests, Tensor lengths, "
       "Tensor(a!) scores) -> ()",
       Tensor queries, Tensor weights, Tensor cache, Tensor block_table, Tensor requests, Tensor lengths,
       Tensor scores) {
  IndexScoresProblem p{};
  static_cast<IndexProblem&>(p) = expect_index(queries, weights, cache, block_table, requests, lengths);
  expect(scores, "scores", {ScalarType::Float}, {{"T", p.tokens}, {"N"}}, queries);
  p.scores = data<float>(scores), p.score_token = stride_of(scores, 0);
  p.positions = expect_int32(scores.size(1), "scores", "positions");
  if (p.tokens == 0 || p.positions == 0) return;
  MLA_RUN(queries, index_scores, p);
}

MLA_OP(select_top, "(Tensor scores, Tensor lengths, Tensor(a!) chosen) -> ()", Tensor scores, Tensor lengths,
       Tensor chosen) {
  expect(scores, "scores", {ScalarType::Float}, {{"T"}, {"N"}}, scores);
  const int64_t tokens = scores.size(0);
  expect(lengths, "lengths", {ScalarType::Int}, {{"T", tokens}}, scores);
  expect(chosen, "chosen", {ScalarType::Int}, {{"T", tokens}, {"topk"}}, scores);

  SelectTopProblem p{};
  p.tokens = tokens;
  p.scores = data<const float>(scores), p.score_token = stride_of(scores, 0);
  p.positions = expect_int32(scores.size(1), "scores", "positions");
  p.length = data<const int32_t>(lengths);
  p.topk = expect_int32(chosen.size(1), "chosen", "positions a token");
  p.chosen = data<int32_t>(chosen), p.chosen_token = stride_of(chosen, 0);
  if (tokens == 0 || p.topk == 0) return;
  MLA_RUN(scores, select_top, p);
}

MLA_OP(select_tokens,
       "(Tensor queries, Tensor weights, Tensor cache, Tensor block_table, Tensor requests, Tensor lengths, "
       "Tensor? slots_of, SymInt slot_block_size, Tensor(a!)? workspace, Tensor(b!) out, Tensor(c!)? scores) -> ()",
       Tensor queries, Tensor weights, Tensor cache, Tensor block_table, Tensor requests, Tensor lengths,
       OptionalTensor slots_of, int64_t slot_block_size, OptionalTensor workspace, Tensor out, OptionalTensor scores) {
  SelectTokensProblem p{};
  static_cast<IndexProblem&>(p) = expect_index(queries, weights, cache, block_table, requests, lengths);
  if (p.max_blocks > 0 && p.cache.block_size > kMaxSelectPositions / p.max_blocks)
    reject("block_table", "of up to " + std::to_string(kMaxSelectPositions) + " positions a request",
           std::to_string(p.max_blocks) + " blocks of " + std::to_string(p.cache.block_size));
  p.positions = p.max_blocks > 0 ? p.max_blocks * static_cast<int32_t>(p.cache.block_size) : 0;
  expect(out, "out", {ScalarType::Int}, {{"T", p.tokens}, {"topk"}}, queries);
  const int64_t topk = out.size(1);
  if (topk < 1 || topk > kMaxSelected) reject("topk", "1 to " + std::to_string(kMaxSelected), std::to_string(topk));
  p.topk = static_cast<int32_t>(topk);
  p.chosen = data<int32_t>(out), p.chosen_token = stride_of(out, 0);
  p.chosen_scores = const_cast<float*>(
      optional_data<float>(scores, "scores", ScalarType::Float, {{"T", p.tokens}, {"topk", topk}}, queries));
  p.chosen_score_token = scores ? stride_of(*scores, 0) : 0;
  p.slots.blocks = optional_data<int32_t>(slots_of, "slots_of", ScalarType::Int, {{"R"}, {"max_blocks"}}, queries);
  if (slots_of) {
    p.slots.stride = stride_of(*slots_of, 0), p.slots.requests = slots_of->size(0);
    p.slots.max_blocks = expect_int32(slots_of->size(1), "slots_of", "blocks a request");
    p.slots.block_size = expect_range(slot_block_size, "slot_block_size", 1, kMaxSize);
  }
  if (workspace) {
    expect(*workspace, "workspace", {ScalarType::Byte}, {{"bytes"}}, queries);
    p.workspace = data<uint8_t>(*workspace), p.workspace_bytes = workspace->size(0);
    if (reinterpret_cast<uintptr_t>(p.workspace) % kSelectAlignment != 0)
      reject("workspace", "at a multiple of " + std::to_string(kSelectAlignment) + " bytes", "another address");
  }
  if (p.tokens == 0) return;
  const int64_t needed = workspace_bytes(p, queries);
  if (p.workspace_bytes < needed)
    reject("workspace", "uint8 [" + std::to_string(needed) + "] or more for this call",
           workspace ? describe(*workspace) : "None");
  MLA_RUN(queries, select_tokens, p);
}

}  // namespace mla::bindings
