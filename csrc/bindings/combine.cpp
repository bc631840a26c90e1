#include "bindings/op.h"
#include "mla/limits.h"

namespace mla::bindings {
namespace {

template <typename Value>
void combine(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse) {
  CombineProblem<Value> p{};
  p.partials = expect_int32(outs.size(0), "outs", "partial results");
  p.tokens = outs.size(1);
  p.heads = expect_int32(outs.size(2), "outs", "heads");
  p.dim = static_cast<int32_t>(outs.size(3));
  p.outs = data<const Value>(outs);
  p.outs_partial = stride_of(outs, 0), p.outs_token = stride_of(outs, 1), p.outs_head = stride_of(outs, 2);
  p.lses = data<const float>(lses);
  p.lses_partial = stride_of(lses, 0), p.lses_token = stride_of(lses, 1), p.lses_head = stride_of(lses, 2);
  p.out = data<Value>(out), p.out_token = stride_of(out, 0), p.out_head = stride_of(out, 1);
  p.lse = data<float>(lse), p.lse_token = stride_of(lse, 0), p.lse_head = stride_of(lse, 1);
  MLA_RUN(outs, combine_partials, p);
}

}  // namespace

MLA_OP(combine_partials, "(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()", Tensor outs, Tensor lses,
       Tensor out, Tensor lse) {
  expect(outs, "outs", {ScalarType::BFloat16, ScalarType::Float}, {{"P"}, {"T"}, {"H"}, {"D"}}, outs);
  const int64_t partials = outs.size(0), tokens = outs.size(1), heads = outs.size(2), dim = outs.size(3);
  if (partials == 0) reject("outs", "of one partial result or more", describe(outs));
  if (dim > kMaxCombineDim)
    reject("outs", "of at most " + std::to_string(kMaxCombineDim) + " values a head", describe(outs));
  expect(lses, "lses", {ScalarType::Float}, {{"P", partials}, {"T", tokens}, {"H", heads}}, outs, Strides::any);
  expect(out, "out", {outs.scalar_type()}, {{"T", tokens}, {"H", heads}, {"D", dim}}, outs);
  expect(lse, "lse", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, outs, Strides::any);
  if (tokens * heads == 0) return;
  outs.scalar_type() == ScalarType::Float ? combine<float>(outs, lses, out, lse)
                                          : combine<uint16_t>(outs, lses, out, lse);
}

}  // namespace mla::bindings
