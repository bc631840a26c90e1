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
  expect(queries, "queries", {ScalarType::Float, ScalarType::BFloat16}, {{"T"}, {"H"}, kIndexDim}, queries);
  const int64_t tokens = queries.size(0), heads = queries.size(1);
  if (heads < 1 || heads > kMaxIndexHeads)
    reject("queries", "of 1 to " + std::to_string(kMaxIndexHeads) + " heads", describe(queries));
  expect(weights, "weights", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, queries);
  expect(block_table, "block_table", {ScalarType::Int}, {{"R"}, {"max_blocks"}}, queries);
  expect(requests, "requests", {ScalarType::Int}, {{"T", tokens}}, queries);
  expect(lengths, "lengths", {ScalarType::Int}, {{"T", tokens}}, queries);
  expect(scores, "scores", {ScalarType::Float}, {{"T", tokens}, {"N"}}, queries);

  IndexScoresProblem p{};
  p.tokens = tokens;
  p.heads = static_cast<int32_t>(heads);
  p.queries = queries.data_ptr();
  p.queries_fp32 = queries.scalar_type() == ScalarType::Float;
  p.query_token = queries.stride(0), p.query_head = queries.stride(1);
  p.weights = data<const float>(weights), p.weight_token = weights.stride(0);
  p.cache = expect_key_cache(cache, "cache", queries);
  p.block_table = data<const int32_t>(block_table), p.table_stride = stride_of(block_table, 0);
  p.requests = block_table.size(0);
  p.max_blocks = expect_int32(block_table.size(1), "block_table", "blocks a request");
  p.request = data<const int32_t>(requests);
  p.length = data<const int32_t>(lengths);
  p.scores = data<float>(scores), p.score_token = stride_of(scores, 0);
  p.positions = expect_int32(scores.size(1), "scores", "positions");
  if (tokens == 0 || p.positions == 0) return;
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

}  // namespace mla::bindings
