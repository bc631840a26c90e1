#include "bindings/op.h"

namespace mla::bindings {
namespace {

template <typename Value>
void combine(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse) {
  CombineProblem<Value> p{};
  p.outs = expect<Value>(outs, "outs", {ScalarType::BFloat16, ScalarType::Float}, {{"P"}, {"T"}, {"H"}, {"D"}}, outs,
                         {&p.outs_partial, &p.outs_token, &p.outs_head});
  const Dim P{"P", outs.size(0)}, T{"T", outs.size(1)}, H{"H", outs.size(2)}, D{"D", outs.size(3)};
  if (P.size == 0) reject("outs", "of one partial result or more", describe(outs));
  if (D.size > kMaxCombineDim)
    reject("outs", "of at most " + std::to_string(kMaxCombineDim) + " values a head", describe(outs));
  p.partials = expect_int32(P.size, "outs", "partial results");
  p.tokens = T.size;
  p.heads = expect_int32(H.size, "outs", "heads");
  p.dim = static_cast<int32_t>(D.size);
  p.lses = expect<float>(lses, "lses", {P, T, H}, outs, {&p.lses_partial, &p.lses_token, &p.lses_head});
  p.out.data = expect<Value>(out, "out", {T, H, D}, outs, {&p.out.token, &p.out.head});
  p.lse.data = expect<float>(lse, "lse", {T, H}, outs, {&p.lse.token, &p.lse.head});
  if (p.tokens * p.heads == 0) return;
  MLA_RUN(outs, combine_partials, p);
}

}  // namespace

MLA_OP(combine_partials, Tensor outs, Tensor lses, Written out, Written lse) {
  const bool fp32 = outs.defined() && outs.scalar_type() == ScalarType::Float;
  (fp32 ? combine<float> : combine<uint16_t>)(outs, lses, out, lse);
}

}  // namespace mla::bindings
