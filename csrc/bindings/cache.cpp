#include "bindings/op.h"

namespace mla::bindings {

MLA_OP(cache_write,
       "(Tensor kv_c, Tensor? k_pe, Tensor(a!) cache, Tensor slots, bool power_of_two, int format, float scale) -> ()",
       Tensor kv_c, OptionalTensor k_pe, Tensor cache, Tensor slots, bool power_of_two, int64_t format, double scale) {
  CacheWriteProblem p{};
  p.cache = expect_cache(cache, "cache", format, "format", cache);
  const CacheFormat& rows = p.cache.format;
  const ScalarType half = rows.code == Code::f16 ? ScalarType::Half : ScalarType::BFloat16;
  expect(kv_c, "kv_c", {half, ScalarType::Float}, {{"N"}, rows.latent}, cache);
  const int64_t tokens = kv_c.size(0);
  if (k_pe && rows.rope == 0) reject("k_pe", "None with " + std::string(rows.name) + " rows", describe(*k_pe));
  if (!k_pe && rows.rope > 0) reject("k_pe", "given with " + std::string(rows.name) + " rows", "nothing");
  if (k_pe) expect(*k_pe, "k_pe", {kv_c.scalar_type()}, {{"N", tokens}, rows.rope}, cache);
  expect(slots, "slots", {ScalarType::Long, ScalarType::Int}, {{"N", tokens}}, cache);
  p.tokens = tokens;
  p.latent = kv_c.data_ptr(), p.latent_token = kv_c.stride(0);
  if (k_pe) p.rope = k_pe->data_ptr(), p.rope_token = k_pe->stride(0);
  p.source = kv_c.scalar_type() == ScalarType::Float  ? Source::fp32
             : kv_c.scalar_type() == ScalarType::Half ? Source::f16
                                                      : Source::bf16;
  p.slots = {slots.data_ptr(), slots.scalar_type() == ScalarType::Long};
  p.power_of_two = power_of_two;
  p.scale = expect_cache_scale(scale, "scale", rows);
  if (tokens == 0) return;
  MLA_RUN(cache, cache_write, p);
}

MLA_OP(cache_gather, "(Tensor cache, Tensor slots, int format, float scale, Tensor(a!) out) -> ()", Tensor cache,
       Tensor slots, int64_t format, double scale, Tensor out) {
  CacheGatherProblem p{};
  p.cache = expect_cache(cache, "cache", format, "format", cache);
  const CacheFormat& rows = p.cache.format;
  expect(slots, "slots", {ScalarType::Long, ScalarType::Int}, {{"N"}}, cache);
  p.rows = slots.size(0);
  const ScalarType half = rows.code == Code::f16 ? ScalarType::Half : ScalarType::BFloat16;
  expect(out, "out", {half}, {{"N", p.rows}, rows.head_dim()}, cache);
  p.slots = {slots.data_ptr(), slots.scalar_type() == ScalarType::Long};
  p.scale = expect_cache_scale(scale, "scale", rows);
  p.out = data<uint16_t>(out), p.out_row = out.stride(0);
  if (p.rows == 0) return;
  MLA_RUN(cache, cache_gather, p);
}

}  // namespace mla::bindings
