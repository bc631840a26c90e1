#include "bindings/op.h"
#include "mla/limits.h"

namespace mla::bindings {

MLA_OP(plan,
       "(Tensor? topk_length, Tensor? extra_topk_length, SymInt tokens, SymInt topk, SymInt extra_topk, "
       "bool batch_invariant, int[] launch, Tensor(a!) out) -> ()",
       OptionalTensor topk_length, OptionalTensor extra_topk_length, int64_t tokens, int64_t topk, int64_t extra_topk,
       bool batch_invariant, std::vector<int64_t> launch, Tensor out) {
  expect(out, "out", {ScalarType::Int}, {{"ctas"}, 8}, out);
  if (out.size(0) == 0 || !out.is_contiguous()) reject("out", "contiguous and of one entry or more", describe(out));
  const int32_t* length = optional_data<int32_t>(topk_length, "topk_length", ScalarType::Int, {{"T", tokens}}, out);
  const int32_t* extra_length =
      optional_data<int32_t>(extra_topk_length, "extra_topk_length", ScalarType::Int, {{"T", tokens}}, out);
  PlanProblem p{};
  p.tokens = expect_range(tokens, "num_tokens", 0, kMaxSize);
  p.topk = expect_range(topk, "topk", 0, kMaxSize);
  p.extra_topk = expect_range(extra_topk, "extra_topk", 0, kMaxSize);
  p.length = length, p.extra_length = extra_length;
  p.whole_tokens = batch_invariant;
  p.entries = reinterpret_cast<PlanEntry*>(out.data_ptr());
  p.launch = expect_launch(launch, out);
  MLA_RUN(out, make_plan, p);
}

}  // namespace mla::bindings
