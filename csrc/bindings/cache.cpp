#include "bindings/op.h"

namespace mla::bindings {

MLA_OP(cache_write, "(Tensor kv_c, Tensor k_pe, Tensor(a!) cache, Tensor slots, bool power_of_two) -> ()", Tensor kv_c,
       Tensor k_pe, Tensor cache, Tensor slots, bool power_of_two) {
  expect(kv_c, "kv_c", {ScalarType::BFloat16, ScalarType::Float}, {{"N"}, kLatent}, kv_c);
  const int64_t tokens = kv_c.size(0);
  expect(k_pe, "k_pe", {kv_c.scalar_type()}, {{"N", tokens}, kRope}, kv_c);
  expect(slots, "slots", {ScalarType::Long, ScalarType::Int}, {{"N", tokens}}, kv_c);

  CacheWriteProblem p{};
  p.tokens = tokens;
  p.latent = kv_c.data_ptr(), p.latent_token = kv_c.stride(0);
  p.rope = k_pe.data_ptr(), p.rope_token = k_pe.stride(0);
  p.source = kv_c.scalar_type() == ScalarType::Float ? Source::fp32 : Source::bf16;
  p.slots = {slots.data_ptr(), slots.scalar_type() == ScalarType::Long};
  p.power_of_two = power_of_two;
  p.cache = expect_cache(cache, "cache", kv_c);
  if (tokens == 0) return;
  MLA_RUN(kv_c, cache_write, p);
}

MLA_OP(cache_gather, "(Tensor cache, Tensor slots, Tensor(a!) out) -> ()", Tensor cache, Tensor slots, Tensor out) {
  CacheGatherProblem p{};
  p.cache = expect_cache(cache, "cache", cache);
  expect(slots, "slots", {ScalarType::Long, ScalarType::Int}, {{"N"}}, cache);
  p.rows = slots.size(0);
  expect_output(out, "out", {ScalarType::BFloat16}, {{"N", p.rows}, kHeadDim}, cache);
  p.slots = {slots.data_ptr(), slots.scalar_type() == ScalarType::Long};
  p.out = data<uint16_t>(out), p.out_row = out.stride(0);
  if (p.rows == 0) return;
  MLA_RUN(cache, cache_gather, p);
}

}  // namespace mla::bindings
