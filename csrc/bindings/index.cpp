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
  return {data<const uint8_t>(cache), cache.size(0), cache.size(1), cache.stride(0) * (quantised ? 1 : 2), quantised};
}

}  // namespace

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
  p.block_table = data<const int32_t>(block_table), p.table_stride = block_table.stride(0);
  p.requests = block_table.size(0);
  p.max_blocks = expect_int32(block_table.size(1), "block_table", "blocks a request");
  p.request = data<const int32_t>(requests);
  p.length = data<const int32_t>(lengths);
  p.scores = data<float>(scores), p.score_token = scores.stride(0);
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
  p.scores = data<const float>(scores), p.score_token = scores.stride(0);
  p.positions = expect_int32(scores.size(1), "scores", "positions");
  p.length = data<const int32_t>(lengths);
  p.topk = expect_int32(chosen.size(1), "chosen", "positions a token");
  p.chosen = data<int32_t>(chosen), p.chosen_token = chosen.stride(0);
  if (tokens == 0 || p.topk == 0) return;
  MLA_RUN(scores, select_top, p);
}

}  // namespace mla::bindings
