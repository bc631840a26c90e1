#include "bindings/op.h"

namespace mla::bindings {

MLA_OP(plan, OptionalTensor topk_length, OptionalTensor extra_topk_length, SymInt tokens, SymInt topk,
       SymInt extra_topk, bool batch_invariant, std::vector<int64_t> launch, Written out) {
  PlanProblem p{};
  p.entries = reinterpret_cast<PlanEntry*>(expect<int32_t>(out, "out", {{"ctas"}, 8}, out));
  if (out.size(0) == 0) reject("out", "contiguous and of one entry or more", describe(out));
  p.tokens = expect_range(tokens, "num_tokens", 0, kMaxSize);
  p.topk = expect_range(topk, "topk", 0, kMaxSize);
  p.extra_topk = expect_range(extra_topk, "extra_topk", 0, kMaxSize);
  p.length = expect<int32_t>(topk_length, "topk_length", {{"T", tokens}}, out);
  p.extra_length = expect<int32_t>(extra_topk_length, "extra_topk_length", {{"T", tokens}}, out);
  p.whole_tokens = batch_invariant;
  p.launch = expect_launch(launch, out);
  MLA_RUN(out, make_plan, p);
}

}  // namespace mla::bindings
