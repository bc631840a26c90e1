#include <algorithm>
#include <limits>

#include "bindings/op.h"
#include "mla/limits.h"

namespace mla::bindings {
namespace {

// The slots of each token: [T, topk].
SlotList expect_list(const CacheView& cache, const Tensor& indices, const char* indices_name,
                     const OptionalTensor& length, const char* length_name, int64_t tokens, const Tensor& q) {
  expect(indices, indices_name, {ScalarType::Int}, {{"T", tokens}, {"topk"}}, q);
  return {cache,
          data<const int32_t>(indices),
          indices.stride(0),
          expect_int32(indices.size(1), indices_name, "slots a token"),
          false,
          optional_data<int32_t>(length, length_name, ScalarType::Int, {{"T", tokens}}, q)};
}

// The blocks of each request: [B, blocks].
SlotList expect_pages(const CacheView& cache, const Tensor& block_table, const Tensor& lengths, int64_t requests,
                      const Tensor& q) {
  expect(block_table, "block_table", {ScalarType::Int}, {{"B", requests}, {"max_blocks"}}, q);
  expect(lengths, "lengths", {ScalarType::Int}, {{"B", requests}}, q);
  const int64_t most = std::numeric_limits<int32_t>::max(), blocks = block_table.size(1);
  expect_int32(cache.block_size, "cache", "tokens a block");
  const int64_t slots = blocks > most / std::max<int64_t>(cache.block_size, 1) ? most : blocks * cache.block_size;
  return {cache, data<const int32_t>(block_table), block_table.stride(0), static_cast<int32_t>(slots),
          true,  data<const int32_t>(lengths)};
}

RowStrides strides_of(const Tensor& rows) {
  const bool queries = rows.dim() == 4;
  return {rows.stride(0), queries ? rows.stride(1) : 0, rows.stride(queries ? 2 : 1)};
}

// The queries, [T, H, dim] or [B, S, H, dim], as one tensor or in two parts; and what they are scored against.
AttentionProblem problem_of(const Tensor& q, const OptionalTensor& q_rope, bool has_queries, const CacheFormat& format,
                            double scale, double cache_scale) {
  const int64_t rope = format.head_dim() - kLatent;
  const char* q_name = q_rope ? "q_nope" : "q";
  if (q_rope && rope == 0) reject("q", "one tensor with " + std::string(format.name) + " rows", "a pair");
  const int64_t dim = q_rope ? kLatent : format.head_dim();
  if (has_queries)
    expect(q, q_name, {dtype_of(format)}, {{"B"}, {"S"}, {"H"}, dim}, q);
  else
    expect(q, q_name, {dtype_of(format)}, {{"T"}, {"H"}, dim}, q);
  const int64_t tokens = q.size(0), queries = has_queries ? q.size(1) : 1, heads = q.size(has_queries ? 2 : 1);
  if (heads < 1 || heads > kMaxHeads) reject(q_name, "of 1 to " + std::to_string(kMaxHeads) + " heads", describe(q));
  if (queries > kMaxQueries)
    reject(q_name, "of " + std::to_string(kMaxQueries) + " queries a request or fewer", describe(q));

  AttentionProblem p{};
  p.tokens = expect_int32(tokens, q_name, has_queries ? "requests" : "tokens");
  p.heads = static_cast<int32_t>(queries * heads);
  p.query_heads = static_cast<int32_t>(heads);
  p.query_reciprocal = static_cast<uint32_t>(((int64_t{1} << 31) + heads - 1) / heads);
  p.tile = format.tile();
  p.q_nope = data<const uint16_t>(q), p.q_nope_strides = strides_of(q);
  if (q_rope) {
    if (has_queries)
      expect(*q_rope, "q_rope", {dtype_of(format)}, {{"B", tokens}, {"S", queries}, {"H", heads}, rope}, q);
    else
      expect(*q_rope, "q_rope", {dtype_of(format)}, {{"T", tokens}, {"H", heads}, rope}, q);
    p.q_rope = data<const uint16_t>(*q_rope), p.q_rope_strides = strides_of(*q_rope);
  } else if (rope > 0) {
    p.q_rope = p.q_nope + kLatent, p.q_rope_strides = p.q_nope_strides;
  }
  const float own_scale = expect_cache_scale(cache_scale, "cache_scale", format);
  p.scale = expect_finite(static_cast<double>(expect_finite(scale, "scale")) * own_scale, "scale * cache_scale");
  p.value_scale = own_scale;
  return p;
}

Launch use_plan(AttentionProblem& p, const OptionalTensor& plan, const std::vector<int64_t>& numbers,
                bool batch_invariant, const Tensor& q) {
  p.whole_tokens = batch_invariant;
  if (!plan) return {};
  expect(*plan, "plan", {ScalarType::Int}, {{"ctas"}, 8}, q);
  if (plan->size(0) == 0 || !plan->is_contiguous())
    reject("plan", "a contiguous table of one entry or more", describe(*plan));
  p.plan = reinterpret_cast<const PlanEntry*>(plan->data_ptr());
  p.ctas = expect_int32(plan->size(0), "plan", "entries");
  return expect_launch(numbers, *plan);
}

// What a GPU also needs: a plan, and a workspace that the plan's partial results fit into.
void expect_gpu_memory(AttentionProblem& p, const OptionalTensor& plan, const OptionalTensor& workspace,
                       const Tensor& q) {
  if (!plan) reject("plan", "given for CUDA tensors", "nothing");
  if (p.ctas > kMaxGpuCtas)
    reject("plan", "a table of " + std::to_string(kMaxGpuCtas) + " entries or fewer on a GPU", describe(*plan));
  if (!workspace) reject("workspace", "given for CUDA tensors", "nothing");
  expect(*workspace, "workspace", {ScalarType::Float}, {{"floats"}}, q);
  const int64_t needed = Workspace::floats(p.ctas, p.heads), size = workspace->size(0);
  if (size < needed) reject("workspace", "of " + std::to_string(needed) + " floats or more", describe(*workspace));
  p.workspace = data<float>(*workspace);
  if (reinterpret_cast<uintptr_t>(p.workspace) % 16 != 0)
    reject("workspace", "aligned to 16 bytes", "one that begins between");
  p.arrivals = Workspace::arrivals(p.workspace, size, p.ctas, p.heads);
}

}  // namespace

MLA_OP(sparse_attention,
       "(Tensor q, Tensor? q_rope, Tensor cache, Tensor indices, float scale, Tensor? topk_length, Tensor? sink, "
       "Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_topk_length, int cache_format, "
       "int extra_cache_format, float cache_scale, Tensor? plan, int[] launch, Tensor(d!)? workspace, bool "
       "batch_invariant, "
       "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits) -> ()",
       Tensor q, OptionalTensor q_rope, Tensor cache, Tensor indices, double scale, OptionalTensor topk_length,
       OptionalTensor sink, OptionalTensor extra_cache, OptionalTensor extra_indices, OptionalTensor extra_topk_length,
       int64_t cache_format, int64_t extra_cache_format, double cache_scale, OptionalTensor plan,
       std::vector<int64_t> launch, OptionalTensor workspace, bool batch_invariant, Tensor out, Tensor lse,
       OptionalTensor max_logits) {
  if (!q.defined()) reject("q", "bfloat16 [T, H, 576]", "None");
  const CacheView view = expect_cache(cache, "cache", cache_format, "cache_format", q, true);
  const CacheFormat& format = view.format;
  AttentionProblem p = problem_of(q, q_rope, false, format, scale, cache_scale);
  const int64_t tokens = p.tokens, heads = p.heads;
  p.sink = optional_data<float>(sink, "sink", ScalarType::Float, {{"H", heads}}, q);

  p.lists[0] = expect_list(view, indices, "indices", topk_length, "topk_length", tokens, q);
  p.list_count = 1;
  if (extra_cache && !extra_indices) reject("extra_indices", "given with extra_cache", "nothing");
  if (extra_indices && !extra_cache) reject("extra_cache", "given with extra_indices", "nothing");
  if (extra_topk_length && !extra_cache) reject("extra_topk_length", "None without extra_cache", "a tensor");
  if (extra_cache_format != -1 && !extra_cache) reject("extra_cache_format", "None without extra_cache", "a format");
  if (extra_cache) {
    const CacheView extra =
        expect_cache(*extra_cache, "extra_cache", extra_cache_format, "extra_cache_format", q, true);
    const CacheFormat& other = extra.format;
    const auto only_one_is = [&](Scale scale) { return (other.scale == scale) != (format.scale == scale); };
    if (other.head_dim() != format.head_dim() || dtype_of(other) != dtype_of(format) || only_one_is(Scale::tensor) ||
        only_one_is(Scale::power))
      reject("extra_cache", "of a format that goes with " + std::string(format.name), other.name);
    p.lists[1] = expect_list(extra, *extra_indices, "extra_indices", extra_topk_length, "extra_topk_length", tokens, q);
    p.list_count = 2;
  }

  expect(out, "out", {dtype_of(format)}, {{"T", tokens}, {"H", heads}, kValueDim}, q);
  p.out = data<uint16_t>(out), p.out_strides = strides_of(out);
  expect(lse, "lse", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, q, Strides::any);
  p.lse = data<float>(lse), p.lse_strides = strides_of(lse);
  if (max_logits) {
    expect(*max_logits, "max_logits", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, q, Strides::any);
    p.max_logits = data<float>(*max_logits), p.max_strides = strides_of(*max_logits);
  }
  const Launch how = use_plan(p, plan, launch, batch_invariant, q);
  if (tokens == 0) return;
  if (q.is_cuda()) expect_gpu_memory(p, plan, workspace, q);
  MLA_RUN(q, attention, p, how);
}

MLA_OP(dense_attention,
       "(Tensor q, Tensor? q_rope, Tensor cache, Tensor block_table, Tensor lengths, float scale, bool causal, "
       "int cache_format, float cache_scale, Tensor? plan, int[] launch, Tensor(c!)? workspace, bool batch_invariant, "
       "Tensor(a!) out, Tensor(b!) lse) -> ()",
       Tensor q, OptionalTensor q_rope, Tensor cache, Tensor block_table, Tensor lengths, double scale, bool causal,
       int64_t cache_format, double cache_scale, OptionalTensor plan, std::vector<int64_t> launch,
       OptionalTensor workspace, bool batch_invariant, Tensor out, Tensor lse) {
  if (!q.defined()) reject("q", "bfloat16 [B, S, H, 576]", "None");
  const CacheView view = expect_cache(cache, "cache", cache_format, "cache_format", q);
  AttentionProblem p = problem_of(q, q_rope, true, view.format, scale, cache_scale);
  const int64_t requests = q.size(0), queries = q.size(1), heads = q.size(2);
  p.causal = causal;
  p.lists[0] = expect_pages(view, block_table, lengths, requests, q);
  p.list_count = 1;
  expect(out, "out", {dtype_of(view.format)}, {{"B", requests}, {"S", queries}, {"H", heads}, kValueDim}, q);
  p.out = data<uint16_t>(out), p.out_strides = strides_of(out);
  expect(lse, "lse", {ScalarType::Float}, {{"B", requests}, {"H", heads}, {"S", queries}}, q, Strides::any);
  p.lse = data<float>(lse), p.lse_strides = {lse.stride(0), lse.stride(2), lse.stride(1)};
  const Launch how = use_plan(p, plan, launch, batch_invariant, q);
  if (requests == 0 || queries == 0) return;
  if (q.is_cuda()) expect_gpu_memory(p, plan, workspace, q);
  MLA_RUN(q, attention, p, how);
}

}  // namespace mla::bindings
