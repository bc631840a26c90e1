#include <limits>

#include "bindings/op.h"
#include "cuda/ops.h"
#include "mla/limits.h"

namespace mla::bindings {
namespace {

constexpr int64_t kMaxPairs = INT32_MAX;

RowLists expect_lists(const Tensor& indices, const OptionalTensor& length, int64_t queries, int64_t rows,
                      const char* rows_name, const Tensor& first) {
  expect(indices, "indices", {ScalarType::Int}, {{"T", queries}, {"topk"}}, first);
  if (queries * indices.size(1) > kMaxPairs)
    reject("indices", "of at most " + std::to_string(kMaxPairs) + " entries (of all queries together)",
           describe(indices));
  RowLists lists;
  lists.indices = data<const int32_t>(indices);
  lists.stride = stride_of(indices, 0);
  lists.topk = static_cast<int32_t>(indices.size(1));
  lists.length = optional_data<int32_t>(length, "topk_length", ScalarType::Int, {{"T", queries}}, first);
  lists.rows = expect_int32(rows, rows_name, "rows");
  return lists;
}

void expect_heads(const Tensor& tensor, const char* name) {
  if (tensor.size(1) < 1 || tensor.size(1) > kMaxBackwardHeads)
    reject(name, "of 1 to " + std::to_string(kMaxBackwardHeads) + " heads", describe(tensor));
}

void expect_width(const Tensor& tensor, const char* name, int64_t dim) {
  if (!tensor.defined() || tensor.dim() <= dim || (tensor.size(dim) != kHeadDim && tensor.size(dim) != kValueDim))
    reject(name, "of " + std::to_string(kHeadDim) + " or " + std::to_string(kValueDim) + " values a row",
           describe(tensor));
}

// GPU kernels move 16 bytes at a time.
void expect_aligned(const Tensor& tensor, const char* name) {
  if (!tensor.is_cuda() || tensor.numel() == 0) return;
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i)
    aligned &= tensor.size(i) == 1 || tensor.stride(i) * static_cast<int64_t>(tensor.element_size()) % 16 == 0;
  if (!aligned) reject(name, "of rows at multiples of 16 bytes on a GPU", describe(tensor) + " of others");
}

void expect_dense(const Tensor& tensor, const char* name) {
  if (tensor.numel() > 0 && !tensor.is_contiguous()) reject(name, "contiguous", describe(tensor) + " that is not");
}

// Contributions [groups, pairs, width] of a kernel's own number of groups.
int32_t expect_contributions(const Tensor& contributions, int64_t pairs, int64_t width, const Tensor& first) {
  expect(contributions, "contributions", {ScalarType::BFloat16}, {{"groups"}, {"pairs"}, width}, first);
  expect_dense(contributions, "contributions");
  expect_aligned(contributions, "contributions");
  if (contributions.size(0) < 1 || contributions.size(0) > kMaxGroups)
    reject("contributions", "of 1 to " + std::to_string(kMaxGroups) + " groups", describe(contributions));
  if (contributions.size(1) < pairs)
    reject("contributions", "of room for " + std::to_string(pairs) + " pairs or more", describe(contributions));
  return expect_int32(contributions.size(0), "contributions", "groups");
}

int32_t group_heads([[maybe_unused]] const Tensor& q) {
#ifdef MLA_CUDA
  if (q.is_cuda()) return cuda::backward_group_heads(q.get_device_index());
#endif
  return kCpuGroupHeads;
}

}  // namespace

MLA_OP(sparse_delta,
       "(Tensor out, Tensor d_out, Tensor lse, Tensor? d_lse, Tensor? sink, Tensor(a!) delta, Tensor(b!) lse2, "
       "Tensor(c!)? d_sink) -> ()",
       Tensor out, Tensor d_out, Tensor lse, OptionalTensor d_lse, OptionalTensor sink, Tensor delta, Tensor lse2,
       OptionalTensor d_sink) {
  expect(out, "out", {ScalarType::BFloat16}, {{"T"}, {"H"}, kValueDim}, out);
  expect_heads(out, "out");
  const int64_t tokens = out.size(0), heads = out.size(1);
  expect(d_out, "d_out", {ScalarType::BFloat16}, {{"T", tokens}, {"H", heads}, kValueDim}, out);
  expect(lse, "lse", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, out, Strides::any);
  expect(delta, "delta", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, out);
  expect(lse2, "lse2", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, out);
  expect_dense(delta, "delta"), expect_dense(lse2, "lse2");
  expect_aligned(out, "out"), expect_aligned(d_out, "d_out");

  DeltaProblem p{};
  p.tokens = tokens;
  p.heads = static_cast<int32_t>(heads);
  p.out = data<const uint16_t>(out), p.out_token = out.stride(0), p.out_head = out.stride(1);
  p.d_out = data<const uint16_t>(d_out), p.d_out_token = d_out.stride(0), p.d_out_head = d_out.stride(1);
  p.lse = data<const float>(lse), p.lse_token = lse.stride(0), p.lse_head = lse.stride(1);
  if (d_lse) {
    expect(*d_lse, "d_lse", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, out, Strides::any);
    p.d_lse = data<const float>(*d_lse), p.d_lse_token = d_lse->stride(0), p.d_lse_head = d_lse->stride(1);
  }
  p.sink = optional_data<float>(sink, "sink", ScalarType::Float, {{"H", heads}}, out);
  p.delta = data<float>(delta);
  p.lse2 = data<float>(lse2);
  if (d_sink) {
    if (!sink) reject("d_sink", "None without a sink", "a tensor");
    expect(*d_sink, "d_sink", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, out);
    expect_dense(*d_sink, "d_sink");
    p.d_sink = data<float>(*d_sink);
  }
  if (tokens == 0) return;
  MLA_RUN(out, sparse_delta, p);
}

MLA_OP(backward_order,
       "(Tensor indices, Tensor? topk_length, int rows, Tensor(c!)? scratch, Tensor(a!) begin, Tensor(b!) pairs) -> ()",
       Tensor indices, OptionalTensor topk_length, int64_t rows, OptionalTensor scratch, Tensor begin, Tensor pairs) {
  expect(indices, "indices", {ScalarType::Int}, {{"T"}, {"topk"}}, indices);
  if (rows < 0) reject("rows", "0 or more", std::to_string(rows));
  OrderProblem p{};
  p.queries = expect_int32(indices.size(0), "indices", "queries");
  p.lists = expect_lists(indices, topk_length, p.queries, rows, "rows", indices);
  expect(begin, "begin", {ScalarType::Int}, {{"rows + 1", rows + 1}}, indices);
  expect(pairs, "pairs", {ScalarType::Int}, {{"T * topk", indices.numel()}}, indices);
  p.begin = data<int32_t>(begin);
  p.pairs = data<int32_t>(pairs);
#ifdef MLA_CUDA
  if (indices.is_cuda() && pairs.numel() > 0) {
    const CudaLaunch device(indices);
    const int64_t needed = cuda::order_scratch_bytes(pairs.numel(), p.lists.rows);
    if (!scratch) reject("scratch", "given for CUDA tensors", "nothing");
    expect(*scratch, "scratch", {ScalarType::Byte}, {{"bytes"}}, indices);
    expect_aligned(*scratch, "scratch");
    if (scratch->size(0) < needed)
      reject("scratch", "of " + std::to_string(needed) + " bytes or more", describe(*scratch));
    p.scratch = scratch->data_ptr(), p.scratch_bytes = scratch->size(0);
  }
#endif
  MLA_RUN(indices, backward_order, p);
}

// Writes d_q, and what backward_sum makes d_kv of, which is here for its memory to be checked before anything is
// written.
MLA_OP(sparse_backward,
       "(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, float scale, Tensor d_out, Tensor lse2, "
       "Tensor delta, int first, int count, Tensor(a!) d_q, Tensor(b!)? contributions, Tensor(c!)? accumulator, "
       "Tensor(d!)? d_kv) -> ()",
       Tensor q, Tensor kv, Tensor indices, OptionalTensor topk_length, double scale, Tensor d_out, Tensor lse2,
       Tensor delta, int64_t first, int64_t count, Tensor d_q, OptionalTensor contributions, OptionalTensor accumulator,
       OptionalTensor d_kv) {
  expect_width(q, "q", 2);
  const int64_t width = q.size(2);
  expect(q, "q", {ScalarType::BFloat16}, {{"T"}, {"H"}, width}, q);
  expect_heads(q, "q");
  const int64_t queries = q.size(0), heads = q.size(1);
  expect(kv, "kv", {ScalarType::BFloat16}, {{"N"}, width}, q);
  expect(d_out, "d_out", {ScalarType::BFloat16}, {{"T", queries}, {"H", heads}, kValueDim}, q);
  expect(lse2, "lse2", {ScalarType::Float}, {{"T", queries}, {"H", heads}}, q);
  expect(delta, "delta", {ScalarType::Float}, {{"T", queries}, {"H", heads}}, q);
  expect(d_q, "d_q", {ScalarType::BFloat16}, {{"T", queries}, {"H", heads}, width}, q);
  expect_dense(lse2, "lse2"), expect_dense(delta, "delta");
  expect_aligned(q, "q"), expect_aligned(kv, "kv"), expect_aligned(d_out, "d_out"), expect_aligned(d_q, "d_q");
  if (first < 0 || first > queries) reject("first", "0 to T=" + std::to_string(queries), std::to_string(first));
  if (count < 0 || count > queries - first)
    reject("count", "0 to T - first=" + std::to_string(queries - first), std::to_string(count));

  BackwardProblem p{};
  p.first = expect_int32(first, "first", "queries");
  p.count = expect_int32(count, "count", "queries");
  p.heads = static_cast<int32_t>(heads);
  p.width = static_cast<int32_t>(width);
  p.lists = expect_lists(indices, topk_length, queries, kv.size(0), "kv", q);
  p.scale = expect_finite(scale, "scale");
  p.q = data<const uint16_t>(q), p.q_token = q.stride(0), p.q_head = q.stride(1);
  p.kv = data<const uint16_t>(kv), p.kv_row = kv.stride(0);
  constexpr int64_t kMostPieces = std::numeric_limits<uint32_t>::max();  // of 8 numbers, as GPU kernels count them
  if (q.is_cuda() && kv.size(0) > 1 && kv.size(0) * (kv.stride(0) / 8) >= kMostPieces)
    reject("kv", "of less than 64 GiB from its first row to its last", describe(kv));
  p.d_out = data<const uint16_t>(d_out), p.d_out_token = d_out.stride(0), p.d_out_head = d_out.stride(1);
  p.lse2 = data<const float>(lse2);
  p.delta = data<const float>(delta);
  p.d_q = data<uint16_t>(d_q), p.d_q_token = d_q.stride(0), p.d_q_head = d_q.stride(1);
  if (contributions.has_value() == accumulator.has_value())
    reject("contributions", "given unless an accumulator is", contributions ? "both" : "neither");
  if (contributions) {
    p.groups = expect_contributions(*contributions, count * p.lists.topk, width, q);
    p.contributions = data<uint16_t>(*contributions), p.group_stride = contributions->size(1);
    const int32_t groups = head_groups(p.heads, group_heads(q));
    if (p.groups != groups)
      reject("contributions", "bfloat16 [groups=" + std::to_string(groups) + ", pairs, width]",
             describe(*contributions));
  } else {
    if (!q.is_cuda()) reject("accumulator", "None on a CPU, which adds in order; a GPU takes one", "a tensor");
    expect(*accumulator, "accumulator", {ScalarType::Float}, {{"N", kv.size(0)}, width}, q);
    expect_dense(*accumulator, "accumulator"), expect_aligned(*accumulator, "accumulator");
    p.accumulator = data<float>(*accumulator);
  }
  if (d_kv) expect(*d_kv, "d_kv", {ScalarType::BFloat16}, {{"N", kv.size(0)}, width}, q);
  if (count == 0) return;
  MLA_RUN(q, sparse_backward, p);
}

MLA_OP(backward_sum,
       "(Tensor begin, Tensor pairs, Tensor contributions, int first_pair, int pair_count, bool continues, "
       "Tensor(a!)? next, Tensor(b!)? accumulator, Tensor(c!)? d_kv) -> ()",
       Tensor begin, Tensor pairs, Tensor contributions, int64_t first_pair, int64_t pair_count, bool continues,
       OptionalTensor next, OptionalTensor accumulator, OptionalTensor d_kv) {
  expect(begin, "begin", {ScalarType::Int}, {{"rows + 1"}}, begin);
  expect(pairs, "pairs", {ScalarType::Int}, {{"T * topk"}}, begin);
  if (begin.size(0) < 1) reject("begin", "int32 [rows + 1]", describe(begin));
  expect_width(contributions, "contributions", 2);
  const int64_t rows = begin.size(0) - 1, width = contributions.size(2), all = pairs.size(0);
  if (first_pair < 0 || first_pair > all)
    reject("first_pair", "0 to " + std::to_string(all), std::to_string(first_pair));
  if (pair_count < 0 || pair_count > all - first_pair)
    reject("pair_count", "0 to " + std::to_string(all - first_pair), std::to_string(pair_count));

  SumProblem p{};
  p.rows = expect_int32(rows, "begin", "rows");
  p.width = static_cast<int32_t>(width);
  p.begin = data<const int32_t>(begin);
  p.pairs = data<const int32_t>(pairs);
  p.total_pairs = all;
  p.first_pair = first_pair, p.pair_count = pair_count;
  p.groups = expect_contributions(contributions, pair_count, width, begin);
  p.contributions = data<const uint16_t>(contributions), p.group_stride = contributions.size(1);
  const bool one_block = first_pair == 0 && pair_count == all;
  if (!one_block && !next) reject("next", "given unless one block has all pairs", "nothing");
  if ((!one_block || continues) && !accumulator)
    reject("accumulator", "given unless one block has all pairs and continues nothing", "nothing");
  p.continues = continues;
  p.next = const_cast<int32_t*>(optional_data<int32_t>(next, "next", ScalarType::Int, {{"rows", rows}}, begin));
  p.accumulator = const_cast<float*>(
      optional_data<float>(accumulator, "accumulator", ScalarType::Float, {{"rows", rows}, width}, begin));
  if (accumulator) expect_dense(*accumulator, "accumulator"), expect_aligned(*accumulator, "accumulator");
  if (!d_kv && !accumulator) reject("d_kv", "given unless an accumulator is", "nothing");
  if (d_kv) {
    expect(*d_kv, "d_kv", {ScalarType::BFloat16}, {{"rows", rows}, width}, begin);
    expect_aligned(*d_kv, "d_kv");
    p.d_kv = data<uint16_t>(*d_kv), p.d_kv_row = d_kv->stride(0);
  }
  if (rows == 0) return;
  MLA_RUN(begin, backward_sum, p);
}

}  // namespace mla::bindings
