#include <limits>

#include "bindings/op.h"

namespace mla::bindings {

MLA_OP(cache_write,
       "(Tensor kv_c, Tensor? k_pe, Tensor(a!) cache, Tensor slots, bool power_of_two, int format, float scale) -> ()",
       Tensor kv_c, OptionalTensor k_pe, Tensor cache, Tensor slots, bool power_of_two, int64_t format, double scale) {
  CacheWriteProblem p{};
  p.cache = expect_cache(cache, "cache", format, "format", cache);
  const CacheFormat& rows = p.cache.format;
  expect(kv_c, "kv_c", {dtype_of(rows), ScalarType::Float}, {{"N"}, rows.latent}, cache);
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
  expect(out, "out", {dtype_of(rows)}, {{"N", p.rows}, rows.head_dim()}, cache);
  p.slots = {slots.data_ptr(), slots.scalar_type() == ScalarType::Long};
  p.scale = expect_cache_scale(scale, "scale", rows);
  p.out = data<uint16_t>(out), p.out_row = out.stride(0);
  if (p.rows == 0) return;
  MLA_RUN(cache, cache_gather, p);
}

MLA_OP(stage_rows,
       "(Tensor cache, Tensor block_table, Tensor lengths, Tensor? staged_table, int format, Tensor(a!) out) -> ()",
       Tensor cache, Tensor block_table, Tensor lengths, OptionalTensor staged_table, int64_t format, Tensor out) {
  StageProblem p{};
  p.cache = expect_cache(cache, "cache", format, "format", cache);
  if (p.cache.format.scale != Scale::fp32)
    reject("cache", "one of " + std::string(kFp8DsMla.name) + " rows", p.cache.format.name);
  expect(block_table, "block_table", {ScalarType::Int}, {{"R"}, {"max_blocks"}}, cache);
  p.requests = block_table.size(0);
  p.max_blocks = expect_int32(block_table.size(1), "block_table", "blocks a request");
  p.block_table = data<const int32_t>(block_table), p.table_stride = block_table.stride(0);
  expect(lengths, "lengths", {ScalarType::Int}, {{"R", p.requests}}, cache);
  p.lengths = data<const int32_t>(lengths);
  p.staged_table = optional_data<int32_t>(staged_table, "staged_table", ScalarType::Int,
                                          {{"R", p.requests}, {"max_blocks", p.max_blocks}}, cache);
  if (staged_table) p.staged_stride = staged_table->stride(0);
  p.staged = expect_cache(out, "out", kFormatCount, "out", cache, true);
  const int64_t blocks = p.requests * p.max_blocks;
  if (p.staged.block_size != p.cache.block_size)
    reject("out", "of the cache's block size, " + std::to_string(p.cache.block_size), describe(out));
  if (!staged_table && p.staged.blocks < blocks)
    reject("out", "of R * max_blocks = " + std::to_string(blocks) + " blocks or more", describe(out));
  if (reinterpret_cast<uintptr_t>(p.staged.data) % 16 != 0 || p.staged.block_stride % 16 != 0)
    reject("out", "of blocks that begin at multiples of 16 bytes", "others");
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // of a launch, and a cache has no more
  if (blocks > 0 && p.cache.block_size > kMostRows / blocks)
    reject("block_table", "of R * max_blocks blocks that hold " + std::to_string(kMostRows) + " rows or fewer",
           describe(block_table));
  if (blocks == 0) return;
  MLA_RUN(cache, stage_rows, p);
}

}  // namespace mla::bindings
