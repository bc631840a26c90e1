// The schemas, and which devices implement them. Every op writes into tensors that the caller made, so that a
// captured graph allocates nothing; the Python API makes them for those who don't care.
#include "bindings/ops.h"

STABLE_TORCH_LIBRARY(mla_backend, m) {
  m.def(
      "sparse_attention(Tensor q, Tensor? q_rope, Tensor cache, Tensor indices, float scale, Tensor? topk_length, "
      "Tensor? sink, Tensor? extra_cache, Tensor? extra_indices, Tensor? extra_topk_length, Tensor? plan, "
      "Tensor(d!)? workspace, bool batch_invariant, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? max_logits) -> ()");
  m.def(
      "plan(Tensor? topk_length, Tensor? extra_topk_length, SymInt tokens, SymInt topk, SymInt extra_topk, "
      "bool batch_invariant, Tensor(a!) out) -> ()");
  m.def("merge_partials(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def("cache_write(Tensor kv_c, Tensor k_pe, Tensor(a!) cache, Tensor slots, bool power_of_two) -> ()");
  m.def("cache_gather(Tensor cache, Tensor slots, Tensor(a!) out) -> ()");
  m.def(
      "convert_indices(Tensor positions, Tensor block_table, Tensor request_ids, SymInt block_size, bool compact, "
      "Tensor(a!) slots, Tensor(b!) counts) -> ()");
  m.def(
      "index_scores(Tensor queries, Tensor weights, Tensor cache, Tensor block_table, Tensor requests, "
      "Tensor lengths, Tensor(a!) scores) -> ()");
  m.def("select_top(Tensor scores, Tensor lengths, Tensor(a!) chosen) -> ()");
}

namespace {
// Each binding finds out by itself where its tensors are.
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("sparse_attention", TORCH_BOX(&mla::bindings::sparse_attention));
  m.impl("plan", TORCH_BOX(&mla::bindings::plan));
  m.impl("merge_partials", TORCH_BOX(&mla::bindings::merge_partials));
  m.impl("cache_write", TORCH_BOX(&mla::bindings::cache_write));
  m.impl("cache_gather", TORCH_BOX(&mla::bindings::cache_gather));
  m.impl("convert_indices", TORCH_BOX(&mla::bindings::convert_indices));
  m.impl("index_scores", TORCH_BOX(&mla::bindings::index_scores));
  m.impl("select_top", TORCH_BOX(&mla::bindings::select_top));
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mla_backend, CPU, m) { implement(m); }

#ifdef MLA_CUDA
STABLE_TORCH_LIBRARY_IMPL(mla_backend, CUDA, m) { implement(m); }
#endif
