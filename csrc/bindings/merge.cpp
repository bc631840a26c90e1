#include "bindings/op.h"
#include "mla/limits.h"

namespace mla::bindings {
namespace {

template <typename Value>
void merge(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse) {
  MergeProblem<Value> p{};
  p.parts = expect_int32(outs.size(0), "outs", "parts");
  p.tokens = outs.size(1);
  p.heads = expect_int32(outs.size(2), "outs", "heads");
  p.dim = static_cast<int32_t>(outs.size(3));
  p.part_out = data<const Value>(outs);
  p.part_out_part = stride_of(outs, 0), p.part_out_token = stride_of(outs, 1), p.part_out_head = stride_of(outs, 2);
  p.part_lse = data<const float>(lses);
  p.part_lse_part = stride_of(lses, 0), p.part_lse_token = stride_of(lses, 1), p.part_lse_head = stride_of(lses, 2);
  p.out = data<Value>(out), p.out_token = stride_of(out, 0), p.out_head = stride_of(out, 1);
  p.lse = data<float>(lse), p.lse_token = stride_of(lse, 0), p.lse_head = stride_of(lse, 1);
  MLA_RUN(outs, merge_partials, p);
}

}  // namespace

MLA_OP(merge_partials, "(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()", Tensor outs, Tensor lses,
       Tensor out, Tensor lse) {
  expect(outs, "outs", {ScalarType::BFloat16, ScalarType::Float}, {{"P"}, {"T"}, {"H"}, {"D"}}, outs);
  const int64_t parts = outs.size(0), tokens = outs.size(1), heads = outs.size(2), dim = outs.size(3);
  if (parts == 0) reject("outs", "of one part or more", describe(outs));
  if (dim > kMaxMergeDim)
    reject("outs", "of at most " + std::to_string(kMaxMergeDim) + " values a head", describe(outs));
  expect(lses, "lses", {ScalarType::Float}, {{"P", parts}, {"T", tokens}, {"H", heads}}, outs, Strides::any);
  expect(out, "out", {outs.scalar_type()}, {{"T", tokens}, {"H", heads}, {"D", dim}}, outs);
  expect(lse, "lse", {ScalarType::Float}, {{"T", tokens}, {"H", heads}}, outs, Strides::any);
  if (tokens * heads == 0) return;
  outs.scalar_type() == ScalarType::Float ? merge<float>(outs, lses, out, lse) : merge<uint16_t>(outs, lses, out, lse);
}

}  // namespace mla::bindings
