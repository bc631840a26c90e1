#include <algorithm>

#include "bindings/op.h"

namespace mla::bindings {
namespace {

// The slots of each token: [T, topk].
SlotList expect_list(const CacheView& cache, const Tensor& indices, const char* indices_name,
                     const OptionalTensor& length, const char* length_name, Dim T, const Tensor& q) {
  SlotList list{};
  list.cache = cache;
  list.entries = expect<int32_t>(indices, indices_name, {T, {"topk"}}, q, {&list.stride});
  list.topk = expect_int32(indices.size(1), indices_name, "slots a token");
  list.length = expect<int32_t>(length, length_name, {T}, q);
  return list;
}

// The blocks of each request: [B, blocks].
SlotList expect_pages(const CacheView& cache, const Tensor& block_table, const Tensor& lengths, Dim B,
                      const Tensor& q) {
  SlotList list{};
  list.cache = cache;
  list.paged = true;
  list.entries = expect<int32_t>(block_table, "block_table", {B, {"max_blocks"}}, q, {&list.stride});
  list.length = expect<int32_t>(lengths, "lengths", {B}, q);
  expect_int32(cache.block_size, "cache", "tokens a block");
  const int64_t blocks = std::min(block_table.size(1), kMaxSize);
  list.topk = static_cast<int32_t>(std::min(blocks * cache.block_size, kMaxSize));
  return list;
}

Products expect_products(int64_t number, const CacheFormat& format) {
  const auto products = static_cast<Products>(expect_range(number, "products", 0, kProductsCount - 1));
  if (products == Products::fp8 && format.code != Code::e4m3)
    reject("products", "'exact' with " + std::string(format.name) + " rows, whose latent values are not e4m3", "'fp8'");
  return products;
}

// The queries, [T, H, dim] or [B, S, H, dim], as one tensor or in two parts; and what they are scored against.
AttentionProblem problem_of(const Tensor& q, const OptionalTensor& q_rope, bool has_queries, const CacheFormat& format,
                            double scale, double cache_scale, int64_t products) {
  const int64_t rope = format.head_dim() - kLatent;
  const char* q_name = q_rope ? "q_nope" : "q";
  if (q_rope && rope == 0) reject("q", "one tensor with " + std::string(format.name) + " rows", "a pair");
  const auto expect_rows = [&](const Tensor& rows, const char* name, Dim tokens, Dim queries, Dim heads, int64_t dim,
                               RowStrides& strides) {
    return has_queries ? expect<uint16_t>(rows, name, {dtype_of(format)}, {tokens, queries, heads, dim}, q,
                                          {&strides.token, &strides.query, &strides.head})
                       : expect<uint16_t>(rows, name, {dtype_of(format)}, {tokens, heads, dim}, q,
                                          {&strides.token, &strides.head});
  };
  Dim tokens(has_queries ? "B" : "T"), queries("S"), heads("H");
  AttentionProblem p{};
  p.q_nope = expect_rows(q, q_name, tokens, queries, heads, q_rope ? kLatent : format.head_dim(), p.q_nope_strides);
  tokens.size = q.size(0), queries.size = has_queries ? q.size(1) : 1;
  p.tokens = expect_int32(tokens.size, q_name, has_queries ? "requests" : "tokens");
  p.query_heads = expect_heads(q, q_name, 1, kMaxHeads, has_queries ? 2 : 1);
  heads.size = p.query_heads;
  if (queries.size > kMaxQueries)
    reject(q_name, "of " + std::to_string(kMaxQueries) + " queries a request or fewer", describe(q));
  p.heads = static_cast<int32_t>(queries.size * heads.size);
  p.query_reciprocal = static_cast<uint32_t>(ceil_div(int64_t{1} << 31, heads.size));
  p.tile = format.tile();
  if (q_rope)
    p.q_rope = expect_rows(*q_rope, "q_rope", tokens, queries, heads, rope, p.q_rope_strides);
  else if (rope > 0)
    p.q_rope = p.q_nope + kLatent, p.q_rope_strides = p.q_nope_strides;
  p.products = expect_products(products, format);
  p.value_scale = expect_cache_scale(cache_scale, "cache_scale", format);
  p.scale = expect_finite(static_cast<double>(expect_finite(scale, "scale")) * p.value_scale, "scale * cache_scale");
  return p;
}

// What a GPU also needs: a workspace that the plan's partial results fit into.
void expect_gpu_memory(AttentionProblem& p, const OptionalTensor& plan, const OptionalTensor& workspace,
                       const Tensor& q) {
  if (!plan) reject("plan", "given for CUDA tensors", "nothing");
  if (p.ctas > kMaxGpuCtas)
    reject("plan", "a table of " + std::to_string(kMaxGpuCtas) + " entries or fewer on a GPU", describe(*plan));
  if (!workspace) reject("workspace", "given for CUDA tensors", "nothing");
  p.workspace = expect<float>(*workspace, "workspace", {{"floats"}}, q);
  const int64_t needed = Workspace::floats(p.ctas, p.heads), size = workspace->size(0);
  if (size < needed) reject("workspace", "of " + std::to_string(needed) + " floats or more", describe(*workspace));
  if (reinterpret_cast<uintptr_t>(p.workspace) % 16 != 0)
    reject("workspace", "aligned to 16 bytes", "one that begins between");
  p.arrivals = Workspace::arrivals(p.workspace, size, p.ctas, p.heads);
}

// Runs a problem that lacks only its plan and its workspace.
void run(AttentionProblem& p, const OptionalTensor& plan, const std::vector<int64_t>& numbers,
         const OptionalTensor& workspace, bool batch_invariant, const Tensor& q) {
  p.whole_tokens = batch_invariant;
  Launch launch{};
  if (plan) {
    p.plan = reinterpret_cast<const PlanEntry*>(expect<int32_t>(*plan, "plan", {{"ctas"}, 8}, q));
    if (plan->size(0) == 0) reject("plan", "a contiguous table of one entry or more", describe(*plan));
    p.ctas = expect_int32(plan->size(0), "plan", "entries");
    launch = expect_launch(numbers, *plan);
  }
  if (p.tokens == 0 || p.heads == 0) return;
  if (q.is_cuda()) expect_gpu_memory(p, plan, workspace, q);
  MLA_RUN(q, attention, p, launch);
}

}  // namespace

MLA_OP(sparse_attention, Tensor q, OptionalTensor q_rope, Tensor cache, Tensor indices, double scale,
       OptionalTensor topk_length, OptionalTensor sink, OptionalTensor extra_cache, OptionalTensor extra_indices,
       OptionalTensor extra_topk_length, int64_t cache_format, int64_t extra_cache_format, double cache_scale,
       int64_t products, OptionalTensor plan, std::vector<int64_t> launch, OptionalWritten workspace,
       bool batch_invariant, Written out, Written lse, OptionalWritten max_logits) {
  if (!q.defined()) reject("q", "bfloat16 [T, H, 576]", "None");
  const CacheView view = expect_cache(cache, "cache", cache_format, "cache_format", q, true);
  const CacheFormat& format = view.format;
  AttentionProblem p = problem_of(q, q_rope, false, format, scale, cache_scale, products);
  const Dim T{"T", p.tokens}, H{"H", p.heads};
  p.sink = expect<float>(sink, "sink", {H}, q);

  p.lists[0] = expect_list(view, indices, "indices", topk_length, "topk_length", T, q);
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
        only_one_is(Scale::power) || only_one_is(Scale::e4m3))
      reject("extra_cache", "of a format that goes with " + std::string(format.name), other.name);
    expect_products(products, other);
    p.lists[1] = expect_list(extra, *extra_indices, "extra_indices", extra_topk_length, "extra_topk_length", T, q);
    p.list_count = 2;
  }

  p.out = expect<uint16_t>(out, "out", {dtype_of(format)}, {T, H, kValueDim}, q,
                           {&p.out_strides.token, &p.out_strides.head});
  p.lse = expect<float>(lse, "lse", {T, H}, q, {&p.lse_strides.token, &p.lse_strides.head});
  p.max_logits = expect<float>(max_logits, "max_logits", {T, H}, q, {&p.max_strides.token, &p.max_strides.head});
  run(p, plan, launch, workspace, batch_invariant, q);
}

MLA_OP(dense_attention, Tensor q, OptionalTensor q_rope, Tensor cache, Tensor block_table, Tensor lengths, double scale,
       bool causal, int64_t cache_format, double cache_scale, int64_t products, OptionalTensor plan,
       std::vector<int64_t> launch, OptionalWritten workspace, bool batch_invariant, Written out, Written lse) {
  if (!q.defined()) reject("q", "bfloat16 [B, S, H, 576]", "None");
  const CacheView view = expect_cache(cache, "cache", cache_format, "cache_format", q);
  AttentionProblem p = problem_of(q, q_rope, true, view.format, scale, cache_scale, products);
  const Dim B{"B", p.tokens}, S{"S", q.size(1)}, H{"H", p.query_heads};
  p.causal = causal;
  p.lists[0] = expect_pages(view, block_table, lengths, B, q);
  p.list_count = 1;
  p.out = expect<uint16_t>(out, "out", {dtype_of(view.format)}, {B, S, H, kValueDim}, q,
                           {&p.out_strides.token, &p.out_strides.query, &p.out_strides.head});
  p.lse = expect<float>(lse, "lse", {B, H, S}, q, {&p.lse_strides.token, &p.lse_strides.head, &p.lse_strides.query});
  run(p, plan, launch, workspace, batch_invariant, q);
}

}  // namespace mla::bindings
