#include <algorithm>

#include "bindings/op.h"

namespace mla::bindings {
namespace {

KeyCacheView expect_key_cache(const Tensor& cache, const Tensor& same_device_as) {
  const char* accepted = "uint8 [blocks, block_size, 132 or 68] or bfloat16 [blocks, block_size, 128]";
  if (!cache.defined() || cache.dim() != 3) reject("cache", accepted, describe(cache));
  const ScalarType dtype = cache.scalar_type();
  const bool quantised = dtype == ScalarType::Byte;
  const KeyNumber number = !quantised                  ? KeyNumber::bf16
                           : cache.size(2) < kIndexDim ? KeyNumber::mxfp4
                                                       : KeyNumber::e4m3;
  const int64_t width = quantised ? key_value_bytes(number) + kKeyScaleBytes : kIndexDim;
  if ((!quantised && dtype != ScalarType::BFloat16) || cache.size(2) != width)
    reject("cache", accepted, describe(cache));
  KeyCacheView keys{nullptr, cache.size(0), cache.size(1), 0, number};
  int64_t of_blocks, of_keys;
  keys.data = expect<uint8_t>(cache, "cache", {dtype}, {{"blocks"}, {"block_size"}, width}, same_device_as,
                              {&of_blocks, &of_keys});
  if (keys.block_size == 0) reject("cache", "of a block size of 1 or more", describe(cache));
  if (keys.blocks > 0 && keys.block_size > 1 && of_keys != width)
    reject("cache", "of blocks that lie in one piece (stride " + std::to_string(width) + " in dimension 1)",
           "stride " + std::to_string(of_keys));
  if (keys.blocks > 1) keys.block_stride = of_blocks * (quantised ? 1 : 2);
  return keys;
}

Rotations expect_rotations(const Tensor& cos_sin, const char* name, const Tensor& same_device_as) {
  Rotations rotations{};
  rotations.data = expect(cos_sin, name, {ScalarType::Float, ScalarType::BFloat16}, {{"positions"}, kRope},
                          same_device_as, {&rotations.stride});
  rotations.fp32 = cos_sin.scalar_type() == ScalarType::Float;
  rotations.positions = cos_sin.size(0);
  if (rotations.positions == 0) reject(name, "of 1 position or more", describe(cos_sin));
  return rotations;
}

// Queries, and the keys that they see. T and H of other arguments are those of `queries`.
IndexProblem expect_index(const Tensor& queries, const Tensor& weights, const Tensor& cache, const Tensor& block_table,
                          const Tensor& requests, const Tensor& lengths) {
  IndexProblem p{};
  p.queries = expect(queries, "queries", {ScalarType::Float, ScalarType::BFloat16, ScalarType::Float8_e4m3fn},
                     {{"T"}, {"H"}, kIndexDim}, queries, {&p.query_token, &p.query_head});
  const ScalarType number = queries.scalar_type();
  p.query_number = number == ScalarType::Float      ? QueryNumber::fp32
                   : number == ScalarType::BFloat16 ? QueryNumber::bf16
                                                    : QueryNumber::e4m3;
  p.tokens = queries.size(0);
  p.heads = expect_heads(queries, "queries", 1, kMaxIndexHeads);
  const Dim T{"T", p.tokens}, H{"H", p.heads};
  p.weights = expect<float>(weights, "weights", {T, H}, queries, {&p.weight_token});
  p.block_table = expect<int32_t>(block_table, "block_table", {{"R"}, {"max_blocks"}}, queries, {&p.table_stride});
  p.requests = block_table.size(0);
  p.max_blocks = expect_int32(block_table.size(1), "block_table", "blocks a request");
  p.request = expect<int32_t>(requests, "requests", {T}, queries);
  p.length = expect<int32_t>(lengths, "lengths", {T}, queries);
  p.cache = expect_key_cache(cache, queries);
  return p;
}

int64_t workspace_bytes(const SelectTokensProblem& p, [[maybe_unused]] int gpu) {
#ifdef MLA_CUDA
  if (gpu >= 0) return cuda::select_workspace_bytes(p, gpu);
#endif
  return cpu::select_workspace_bytes(p);
}

}  // namespace

// Bytes that select_tokens works in on a GPU, or (-1) on a CPU. Numbers that it refuses count as the largest that it
// takes.
MLA_EXPORT int64_t mla_backend_select_workspace_bytes(int gpu, int64_t tokens, int64_t heads, int64_t positions,
                                                      int64_t topk) {
  SelectTokensProblem p{};
  p.tokens = tokens, p.heads = static_cast<int32_t>(std::min<int64_t>(heads, kMaxIndexHeads));
  p.positions = static_cast<int32_t>(std::min<int64_t>(positions, kMaxSelectPositions));
  p.topk = static_cast<int32_t>(std::min<int64_t>(topk, kMaxSelected));
  return workspace_bytes(p, gpu);
}

MLA_OP(rotate_queries, Tensor queries, Tensor index_queries, Tensor weights, Tensor positions, Tensor cos_sin,
       Tensor index_cos_sin, double weight_scale, bool interleaved, Written out, Written index_out,
       Written weights_out) {
  RotateQueriesProblem p{};
  p.queries.data =
      expect<uint16_t>(queries, "queries", {{"T"}, {"H"}, kRope}, queries, {&p.queries.token, &p.queries.head});
  p.tokens = queries.size(0);
  p.heads = expect_heads(queries, "queries", 0, kMaxHeads);
  const Dim T{"T", p.tokens}, H{"H", p.heads};
  p.index_queries.data = expect<uint16_t>(index_queries, "index_queries", {T, {"I"}, kIndexDim}, queries,
                                          {&p.index_queries.token, &p.index_queries.head});
  p.index_heads = expect_heads(index_queries, "index_queries", 0, kMaxIndexHeads);
  const Dim I{"I", p.index_heads};
  p.interleaved = interleaved;
  p.weights = expect(weights, "weights", {ScalarType::Float, ScalarType::BFloat16}, {T, I}, queries, {&p.weight_token});
  p.weights_fp32 = weights.scalar_type() == ScalarType::Float;
  p.weight_scale = expect_finite(weight_scale, "weight_scale");
  p.position = expect<int64_t>(positions, "positions", {T}, queries);
  p.rotations = expect_rotations(cos_sin, "cos_sin", queries);
  p.index_rotations = expect_rotations(index_cos_sin, "index_cos_sin", queries);
  p.out.data = expect<uint16_t>(out, "out", {T, H, kRope}, queries, {&p.out.token, &p.out.head});
  p.index_out.data = expect<uint8_t>(index_out, "index_out", {ScalarType::Float8_e4m3fn, ScalarType::Byte},
                                     {T, I, kIndexDim}, queries, {&p.index_out.token, &p.index_out.head});
  p.weights_out = expect<float>(weights_out, "weights_out", {T, I}, queries, {&p.weight_out_token});
  if (p.tokens == 0 || p.heads + p.index_heads == 0) return;
  MLA_RUN(queries, rotate_queries, p);
}

MLA_OP(write_mxfp4_keys, Tensor keys, Written cache, Tensor slots) {
  WriteKeysProblem p{};
  p.keys = expect(keys, "keys", {ScalarType::Float, ScalarType::BFloat16}, {{"N"}, kIndexDim}, keys, {&p.key_token});
  p.fp32 = keys.scalar_type() == ScalarType::Float;
  p.tokens = keys.size(0);
  p.slot = expect<int64_t>(slots, "slots", {{"N", p.tokens}}, keys);
  p.cache = expect_key_cache(cache, keys);
  if (p.cache.number != KeyNumber::mxfp4) reject("cache", "uint8 [blocks, block_size, 68]", describe(cache));
  p.data = const_cast<uint8_t*>(p.cache.data);
  if (p.tokens == 0) return;
  MLA_RUN(keys, write_mxfp4_keys, p);
}

MLA_OP(index_scores, Tensor queries, Tensor weights, Tensor cache, Tensor block_table, Tensor requests, Tensor lengths,
       Written scores) {
  IndexScoresProblem p{};
  static_cast<IndexProblem&>(p) = expect_index(queries, weights, cache, block_table, requests, lengths);
  p.scores = expect<float>(scores, "scores", {{"T", p.tokens}, {"N"}}, queries, {&p.score_token});
  p.positions = expect_int32(scores.size(1), "scores", "positions");
  if (p.tokens == 0 || p.positions == 0) return;
  MLA_RUN(queries, index_scores, p);
}

MLA_OP(select_top, Tensor scores, Tensor lengths, Written chosen) {
  SelectTopProblem p{};
  p.scores = expect<float>(scores, "scores", {{"T"}, {"N"}}, scores, {&p.score_token});
  p.tokens = scores.size(0);
  p.positions = expect_int32(scores.size(1), "scores", "positions");
  p.length = expect<int32_t>(lengths, "lengths", {{"T", p.tokens}}, scores);
  p.chosen = expect<int32_t>(chosen, "chosen", {{"T", p.tokens}, {"topk"}}, scores, {&p.chosen_token});
  p.topk = expect_int32(chosen.size(1), "chosen", "positions a token");
  if (p.tokens == 0 || p.topk == 0) return;
  MLA_RUN(scores, select_top, p);
}

MLA_OP(select_tokens, Tensor queries, Tensor weights, Tensor cache, Tensor block_table, Tensor requests, Tensor lengths,
       OptionalTensor slots_of, SymInt slot_block_size, OptionalTensor candidates, SymInt candidate_size,
       OptionalWritten workspace, Written out, OptionalWritten scores) {
  SelectTokensProblem p{};
  static_cast<IndexProblem&>(p) = expect_index(queries, weights, cache, block_table, requests, lengths);
  if (p.max_blocks > 0 && p.cache.block_size > kMaxSelectPositions / p.max_blocks)
    reject("block_table", "of up to " + std::to_string(kMaxSelectPositions) + " positions a request",
           std::to_string(p.max_blocks) + " blocks of " + std::to_string(p.cache.block_size));
  p.positions = p.max_blocks > 0 ? p.max_blocks * static_cast<int32_t>(p.cache.block_size) : 0;
  p.chosen = expect<int32_t>(out, "out", {{"T", p.tokens}, {"topk"}}, queries, {&p.chosen_token});
  p.topk = expect_range(out.size(1), "topk", 1, kMaxSelected);
  p.chosen_scores =
      expect<float>(scores, "scores", {{"T", p.tokens}, {"topk", p.topk}}, queries, {&p.chosen_score_token});
  if (candidates) {
    CandidateBlocks& own = p.candidate_blocks;
    own.blocks = expect<int32_t>(*candidates, "candidates", {{"T", p.tokens}, {"blocks"}}, queries, {&own.stride});
    own.size = expect_range(candidate_size, "candidate_size", 1, kMaxSelectPositions);
    if (candidates->size(1) > kMaxSelectPositions / own.size)
      reject("candidates", "of up to " + std::to_string(kMaxSelectPositions) + " positions a token",
             std::to_string(candidates->size(1)) + " blocks of " + std::to_string(own.size));
    own.count = static_cast<int32_t>(candidates->size(1)), own.unless = p.topk;
    p.positions = std::max(own.count * own.size, p.topk);
  }
  if (slots_of) p.slots = expect_block_table(*slots_of, "slots_of", slot_block_size, "slot_block_size", queries);
  if (workspace) {
    p.workspace = expect<uint8_t>(*workspace, "workspace", {{"bytes"}}, queries);
    p.workspace_bytes = workspace->size(0);
    if (reinterpret_cast<uintptr_t>(p.workspace) % kSelectAlignment != 0)
      reject("workspace", "at a multiple of " + std::to_string(kSelectAlignment) + " bytes", "another address");
  }
  if (p.tokens == 0) return;
  const int64_t needed = workspace_bytes(p, gpu_of(queries));
  if (p.workspace_bytes < needed)
    reject("workspace", "uint8 [" + std::to_string(needed) + "] or more for this call",
           workspace ? describe(*workspace) : "None");
  MLA_RUN(queries, select_tokens, p);
}

}  // namespace mla::bindings
