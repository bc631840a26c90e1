#include "bindings/op.h"
#include "cuda/ops.h"

namespace mla::bindings {
namespace {

RowLists expect_lists(const Tensor& indices, const OptionalTensor& length, Dim T, int32_t rows, const Tensor& first) {
  RowLists lists;
  lists.indices = expect<int32_t>(indices, "indices", {T, {"topk"}}, first, {&lists.stride});
  if (indices.numel() > kMaxSize)
    reject("indices", "of at most " + std::to_string(kMaxSize) + " entries (of all queries together)",
           describe(indices));
  lists.topk = static_cast<int32_t>(indices.size(1));
  lists.length = expect<int32_t>(length, "topk_length", {{"T", indices.size(0)}}, first);
  lists.rows = rows;
  return lists;
}

int32_t expect_width(const Tensor& tensor, const char* name, int64_t dim) {
  if (!tensor.defined() || tensor.dim() <= dim || (tensor.size(dim) != kHeadDim && tensor.size(dim) != kValueDim))
    reject(name, "of " + std::to_string(kHeadDim) + " or " + std::to_string(kValueDim) + " values a row",
           describe(tensor));
  return static_cast<int32_t>(tensor.size(dim));
}

// GPU kernels move 16 bytes at a time.
void expect_aligned(const Tensor& tensor, const char* name) {
  if (!tensor.is_cuda() || tensor.numel() == 0) return;
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i)
    aligned &= tensor.size(i) == 1 || tensor.stride(i) * static_cast<int64_t>(tensor.element_size()) % 16 == 0;
  if (!aligned) reject(name, "of rows at multiples of 16 bytes on a GPU", describe(tensor) + " of others");
}

// Contributions [groups, pairs, width] of a kernel's own number of groups.
uint16_t* expect_contributions(const Tensor& contributions, int64_t pairs, int64_t width, const Tensor& first) {
  auto* rows = expect<uint16_t>(contributions, "contributions", {{"groups"}, {"pairs"}, width}, first);
  expect_aligned(contributions, "contributions");
  if (contributions.size(0) < 1 || contributions.size(0) > kMaxGroups)
    reject("contributions", "of 1 to " + std::to_string(kMaxGroups) + " groups", describe(contributions));
  if (contributions.size(1) < pairs)
    reject("contributions", "of room for " + std::to_string(pairs) + " pairs or more", describe(contributions));
  return rows;
}

}  // namespace

// Heads whose contributions to kv's gradient the backward adds up before it writes them: on a GPU, or (-1) on a CPU.
MLA_EXPORT int mla_backend_backward_group_heads([[maybe_unused]] int gpu) {
#ifdef MLA_CUDA
  if (gpu >= 0) return cuda::backward_group_heads(gpu);
#endif
  return kCpuGroupHeads;
}

// Bytes that backward_order works in on the current GPU.
MLA_EXPORT int64_t mla_backend_order_scratch_bytes([[maybe_unused]] int64_t pairs, [[maybe_unused]] int rows) {
#ifdef MLA_CUDA
  return cuda::order_scratch_bytes(pairs, rows);
#else
  return 0;
#endif
}

MLA_OP(sparse_delta, Tensor out, Tensor d_out, Tensor lse, OptionalTensor d_lse, OptionalTensor sink, Written delta,
       Written lse2, OptionalWritten d_sink) {
  DeltaProblem p{};
  p.out.data = expect<uint16_t>(out, "out", {{"T"}, {"H"}, kValueDim}, out, {&p.out.token, &p.out.head});
  p.tokens = out.size(0);
  p.heads = expect_heads(out, "out", 1, kMaxBackwardHeads);
  const Dim T{"T", p.tokens}, H{"H", p.heads};
  p.d_out.data = expect<uint16_t>(d_out, "d_out", {T, H, kValueDim}, out, {&p.d_out.token, &p.d_out.head});
  expect_aligned(out, "out"), expect_aligned(d_out, "d_out");
  p.lse.data = expect<float>(lse, "lse", {T, H}, out, {&p.lse.token, &p.lse.head});
  p.d_lse.data = expect<float>(d_lse, "d_lse", {T, H}, out, {&p.d_lse.token, &p.d_lse.head});
  p.sink = expect<float>(sink, "sink", {H}, out);
  p.delta = expect<float>(delta, "delta", {T, H}, out);
  p.lse2 = expect<float>(lse2, "lse2", {T, H}, out);
  if (d_sink && !sink) reject("d_sink", "None without a sink", "a tensor");
  p.d_sink = expect<float>(d_sink, "d_sink", {T, H}, out);
  if (p.tokens == 0) return;
  MLA_RUN(out, sparse_delta, p);
}

MLA_OP(backward_order, Tensor indices, OptionalTensor topk_length, int64_t rows, OptionalWritten scratch, Written begin,
       Written pairs) {
  OrderProblem p{};
  p.lists = expect_lists(indices, topk_length, "T", expect_range(rows, "rows", 0, kMaxSize), indices);
  p.queries = expect_int32(indices.size(0), "indices", "queries");
  p.begin = expect<int32_t>(begin, "begin", {{"rows + 1", rows + 1}}, indices);
  p.pairs = expect<int32_t>(pairs, "pairs", {{"T * topk", indices.numel()}}, indices);
#ifdef MLA_CUDA
  if (indices.is_cuda() && pairs.numel() > 0) {
    const CudaLaunch device(indices);
    const int64_t needed = cuda::order_scratch_bytes(pairs.numel(), p.lists.rows);
    if (!scratch) reject("scratch", "given for CUDA tensors", "nothing");
    p.scratch = expect<uint8_t>(*scratch, "scratch", {{"bytes"}}, indices), p.scratch_bytes = scratch->size(0);
    expect_aligned(*scratch, "scratch");
    if (p.scratch_bytes < needed)
      reject("scratch", "of " + std::to_string(needed) + " bytes or more", describe(*scratch));
  }
#endif
  MLA_RUN(indices, backward_order, p);
}

// Writes d_q, and what backward_sum makes d_kv of, which is here for its memory to be checked before anything is
// written.
MLA_OP(sparse_backward, Tensor q, Tensor kv, Tensor indices, OptionalTensor topk_length, double scale, Tensor d_out,
       Tensor lse2, Tensor delta, int64_t first, int64_t count, Written d_q, OptionalWritten contributions,
       OptionalWritten accumulator, OptionalWritten d_kv) {
  BackwardProblem p{};
  p.width = expect_width(q, "q", 2);
  p.q.data = expect<uint16_t>(q, "q", {{"T"}, {"H"}, p.width}, q, {&p.q.token, &p.q.head});
  p.heads = expect_heads(q, "q", 1, kMaxBackwardHeads);
  const Dim T{"T", q.size(0)}, H{"H", p.heads};
  p.kv = expect<uint16_t>(kv, "kv", {{"N"}, p.width}, q, {&p.kv_row});
  const Dim N{"N", kv.size(0)};
  p.lists = expect_lists(indices, topk_length, T, expect_int32(N.size, "kv", "rows"), q);
  p.scale = expect_finite(scale, "scale");
  p.d_out.data = expect<uint16_t>(d_out, "d_out", {T, H, kValueDim}, q, {&p.d_out.token, &p.d_out.head});
  p.lse2 = expect<float>(lse2, "lse2", {T, H}, q);
  p.delta = expect<float>(delta, "delta", {T, H}, q);
  p.d_q.data = expect<uint16_t>(d_q, "d_q", {T, H, p.width}, q, {&p.d_q.token, &p.d_q.head});
  expect_aligned(q, "q"), expect_aligned(kv, "kv"), expect_aligned(d_out, "d_out"), expect_aligned(d_q, "d_q");
  constexpr int64_t kMostPieces = UINT32_MAX;  // of 8 numbers, as GPU kernels count them
  if (q.is_cuda() && N.size > 1 && N.size * (p.kv_row / 8) >= kMostPieces)
    reject("kv", "of less than 64 GiB from its first row to its last", describe(kv));
  expect_int32(T.size, "q", "queries");
  p.first = expect_range(first, "first", 0, T.size);
  p.count = expect_range(count, "count", 0, T.size - first);
  if (contributions.has_value() == accumulator.has_value())
    reject("contributions", "given unless an accumulator is", contributions ? "both" : "neither");
  if (contributions) {
    p.contributions = expect_contributions(*contributions, count * p.lists.topk, p.width, q);
    p.group_stride = contributions->size(1);
    p.groups = head_groups(p.heads, mla_backend_backward_group_heads(gpu_of(q)));
    if (contributions->size(0) != p.groups)
      reject("contributions", "bfloat16 [groups=" + std::to_string(p.groups) + ", pairs, width]",
             describe(*contributions));
  } else {
    if (!q.is_cuda()) reject("accumulator", "None on a CPU, which adds in order; a GPU takes one", "a tensor");
    p.accumulator = expect<float>(accumulator, "accumulator", {N, p.width}, q);
    expect_aligned(*accumulator, "accumulator");
  }
  int64_t d_kv_row;
  expect<uint16_t>(d_kv, "d_kv", {N, p.width}, q, {&d_kv_row});
  if (count == 0) return;
  MLA_RUN(q, sparse_backward, p);
}

MLA_OP(backward_sum, Tensor begin, Tensor pairs, Tensor contributions, int64_t first_pair, int64_t pair_count,
       bool continues, OptionalWritten next, OptionalWritten accumulator, OptionalWritten d_kv) {
  SumProblem p{};
  p.begin = expect<int32_t>(begin, "begin", {{"rows + 1"}}, begin);
  p.pairs = expect<int32_t>(pairs, "pairs", {{"T * topk"}}, begin);
  if (begin.size(0) < 1) reject("begin", "int32 [rows + 1]", describe(begin));
  p.rows = expect_int32(begin.size(0) - 1, "begin", "rows");
  p.width = expect_width(contributions, "contributions", 2);
  p.total_pairs = expect_int32(pairs.size(0), "pairs", "entries");
  p.first_pair = expect_range(first_pair, "first_pair", 0, p.total_pairs);
  p.pair_count = expect_range(pair_count, "pair_count", 0, p.total_pairs - first_pair);
  p.contributions = expect_contributions(contributions, pair_count, p.width, begin);
  p.groups = static_cast<int32_t>(contributions.size(0)), p.group_stride = contributions.size(1);
  const bool one_block = first_pair == 0 && pair_count == p.total_pairs;
  if (!one_block && !next) reject("next", "given unless one block has all pairs", "nothing");
  if ((!one_block || continues) && !accumulator)
    reject("accumulator", "given unless one block has all pairs and continues nothing", "nothing");
  if (!d_kv && !accumulator) reject("d_kv", "given unless an accumulator is", "nothing");
  p.continues = continues;
  const Dim rows{"rows", p.rows};
  p.next = expect<int32_t>(next, "next", {rows}, begin);
  p.accumulator = expect<float>(accumulator, "accumulator", {rows, p.width}, begin);
  p.d_kv = expect<uint16_t>(d_kv, "d_kv", {rows, p.width}, begin, {&p.d_kv_row});
  if (accumulator) expect_aligned(*accumulator, "accumulator");
  if (d_kv) expect_aligned(*d_kv, "d_kv");
  if (p.rows == 0) return;
  MLA_RUN(begin, backward_sum, p);
}

}  // namespace mla::bindings
