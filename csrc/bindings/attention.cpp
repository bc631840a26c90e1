#include "bindings/op.h"
#include "mla/limits.h"

namespace mla::bindings {
namespace {

SlotList expect_list(const CacheView& cache, const Tensor& indices, const char* indices_name,
                     const OptionalTensor& length, const char* length_name, int64_t tokens, const Tensor& q) {
  SlotList list;
  list.cache = cache;
  expect(indices, indices_name, {ScalarType::Int}, {{"T", tokens}, {"topk"}}, q);
  list.slots = data<const int32_t>(indices);
  list.stride = indices.stride(0);
  list.topk = expect_int32(indices.size(1), indices_name, "slots a token");
  list.length = optional_data<int32_t>(length, length_name, ScalarType::Int, {{"T", tokens}}, q);
  return list;
}

// What a GPU also needs: a plan, and a workspace that the plan's partial results fit into.
void expect_gpu_memory(AttentionProblem& p, const OptionalTensor& plan, const OptionalTensor& workspace,
                       const Tensor& q) {
  if (!plan) reject("plan", "given for CUDA tensors", "nothing");
  if (p.workers > kMaxGpuWorkers)
    reject("plan", "a table of " + std::to_string(kMaxGpuWorkers) + " rows or fewer on a GPU", describe(*plan));
  if (!workspace) reject("workspace", "given for CUDA tensors", "nothing");
  expect(*workspace, "workspace", {ScalarType::Float}, {{"floats"}}, q);
  const int64_t needed = Workspace::floats(p.workers, p.heads), size = workspace->size(0);
  if (size < needed) reject("workspace", "of " + std::to_string(needed) + " floats or more", describe(*workspace));
  p.workspace = data<float>(*workspace);
  if (reinterpret_cast<uintptr_t>(p.workspace) % 16 != 0)
    reject("workspace", "aligned to 16 bytes", "one that begins between");
  p.arrivals = Workspace::arrivals(p.workspace, size, p.workers, p.heads);
}

}  // namespace

MLA_OP(sparse_attention,
       "(Tensor q, Tensor? q_rope, Tensor cache, Tensor indices, float scale, Tensor? topk_length, Tensor? sink, "
       "Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_topk_length, int cache_format, "
       "int extra_cache_format, float cache_scale, Tensor? plan, Tensor(d!)? workspace, bool batch_invariant, "
       "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits) -> ()",
       Tensor q, OptionalTensor q_rope, Tensor cache, Tensor indices, double scale, OptionalTensor topk_length,
       OptionalTensor sink, OptionalTensor extra_cache, OptionalTensor extra_indices, OptionalTensor extra_topk_length,
       int64_t cache_format, int64_t extra_cache_format, double cache_scale, OptionalTensor plan,
       OptionalTensor workspace, bool batch_invariant, Tensor out, Tensor lse, OptionalTensor max_logits) {
  if (!q.defined()) reject("q", "bfloat16 [T, H, 576]", "None");
  const CacheView view = expect_cache(cache, "cache", cache_format, "cache_format", q);
  const CacheFormat& format = view.format;
  const Tile tile = format.tile();
  const int64_t rope = format.head_dim() - kLatent;
  const ScalarType number = tile == Tile::f16_576 ? ScalarType::Half : ScalarType::BFloat16;
  // either the whole query or its two parts
  const char* q_name = q_rope ? "q_nope" : "q";
  if (q_rope && rope == 0) reject("q", "one tensor with " + std::string(format.name) + " rows", "a pair");
  expect(q, q_name, {number}, {{"T"}, {"H"}, q_rope ? kLatent : format.head_dim()}, q);
  const int64_t tokens = q.size(0), heads = q.size(1);
  if (heads < 1 || heads > kMaxHeads) reject(q_name, "of 1 to " + std::to_string(kMaxHeads) + " heads", describe(q));

  AttentionProblem p{};
  p.tokens = expect_int32(tokens, q_name, "tokens");
  p.heads = static_cast<int32_t>(heads);
  p.tile = tile;
  p.q_nope = data<const uint16_t>(q), p.q_nope_token = q.stride(0), p.q_nope_head = q.stride(1);
  if (q_rope) {
    expect(*q_rope, "q_rope", {number}, {{"T", tokens}, {"H", heads}, rope}, q);
    p.q_rope = data<const uint16_t>(*q_rope), p.q_rope_token = q_rope->stride(0), p.q_rope_head = q_rope->stride(1);
  } else if (rope > 0) {
    p.q_rope = p.q_nope + kLatent, p.q_rope_token = p.q_nope_token, p.q_rope_head = p.q_nope_head;
  }
  const float own_scale = expect_cache_scale(cache_scale, "cache_scale", format);
  p.scale = expect_finite(static_cast<double>(expect_finite(scale, "scale")) * own_scale, "scale * cache_scale");
  p.value_scale = own_scale;
  p.sink = optional_data<float>(sink, "sink", ScalarType::Float, {{"H", heads}}, q);

  p.lists[0] = expect_list(view, indices, "indices", topk_length, "topk_length", tokens, q);
  p.list_count = 1;
  if (extra_cache && !extra_indices) reject("extra_indices", "given with extra_cache", "nothing");
  if (extra_indices && !extra_cache) reject("extra_cache", "given with extra_indices", "nothing");
  if (extra_topk_length && !extra_cache) reject("extra_topk_length", "None without extra_cache", "a tensor");
  if (extra_cache) {
    const CacheView extra = expect_cache(*extra_cache, "extra_cache", extra_cache_format, "extra_cache_format", q);
    const CacheFormat& other = extra.format;
    if (other.head_dim() != format.head_dim() || (other.code == Code::f16) != (format.code == Code::f16) ||
        (other.scale == Scale::tensor) != (format.scale == Scale::tensor))
      reject("extra_cache", "of a format that goes with " + std::string(format.name), other.name);
    p.lists[1] = expect_list(extra, *extra_indices, "extra_indices", extra_topk_length, "extra_topk_length", tokens, q);
    p.list_count = 2;
  }

  expect(out, "out", {number}, {{"T", tokens}, {"H", heads}, kValueDim}, q);
  p.out = data<uint16_t>(out), p.out_token = out.stride(0), p.out_head = out.stride(1);
  expect(lse, "lse", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, q, Strides::any);
  p.lse = data<float>(lse), p.lse_token = lse.stride(0), p.lse_head = lse.stride(1);
  if (max_logits) {
    expect(*max_logits, "max_logits", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, q, Strides::any);
    p.max_logits = data<float>(*max_logits), p.max_token = max_logits->stride(0), p.max_head = max_logits->stride(1);
  }

  if (plan) {
    expect(*plan, "plan", {ScalarType::Int}, {{"workers"}, 8}, q);
    if (plan->size(0) == 0 || !plan->is_contiguous())
      reject("plan", "a contiguous table of one row or more", describe(*plan));
    p.plan = reinterpret_cast<const PlanRow*>(plan->data_ptr());
    p.workers = expect_int32(plan->size(0), "plan", "rows");
  }
  p.whole_tokens = batch_invariant;
  if (tokens == 0) return;
  if (q.is_cuda()) expect_gpu_memory(p, plan, workspace, q);
  MLA_RUN(q, sparse_attention, p);
}

}  // namespace mla::bindings
