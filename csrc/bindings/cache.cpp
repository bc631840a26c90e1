#include "bindings/op.h"

namespace mla::bindings {
namespace {

// A slot for each of N rows.
SlotArray expect_slots(const Tensor& slots, Dim N, const Tensor& cache) {
  const void* data = expect(slots, "slots", {ScalarType::Long, ScalarType::Int}, {N}, cache);
  return {data, slots.scalar_type() == ScalarType::Long};
}

}  // namespace

MLA_OP(cache_write, Tensor kv_c, OptionalTensor k_pe, Written cache, Tensor slots, bool power_of_two, int64_t format,
       double scale) {
  CacheWriteProblem p{};
  p.cache = expect_cache(cache, "cache", format, "format", cache);
  const CacheFormat& rows = p.cache.format;
  p.latent = expect(kv_c, "kv_c", {dtype_of(rows), ScalarType::Float}, {{"N"}, rows.latent}, cache, {&p.latent_token});
  const ScalarType source = kv_c.scalar_type();
  p.tokens = kv_c.size(0);
  const Dim N{"N", p.tokens};
  if (k_pe && rows.rope == 0) reject("k_pe", "None with " + std::string(rows.name) + " rows", describe(*k_pe));
  if (!k_pe && rows.rope > 0) reject("k_pe", "given with " + std::string(rows.name) + " rows", "nothing");
  if (k_pe) p.rope = expect(*k_pe, "k_pe", {source}, {N, rows.rope}, cache, {&p.rope_token});
  p.source = source == ScalarType::Float ? Source::fp32 : source == ScalarType::Half ? Source::f16 : Source::bf16;
  p.slots = expect_slots(slots, N, cache);
  p.power_of_two = power_of_two;
  p.scale = expect_cache_scale(scale, "scale", rows);
  if (p.tokens == 0) return;
  MLA_RUN(cache, cache_write, p);
}

MLA_OP(cache_gather, Tensor cache, Tensor slots, int64_t format, double scale, Written out) {
  CacheGatherProblem p{};
  p.cache = expect_cache(cache, "cache", format, "format", cache);
  const CacheFormat& rows = p.cache.format;
  p.slots = expect_slots(slots, "N", cache);
  p.rows = slots.size(0);
  p.scale = expect_cache_scale(scale, "scale", rows);
  p.out = expect<uint16_t>(out, "out", {dtype_of(rows)}, {{"N", p.rows}, rows.head_dim()}, cache, {&p.out_row});
  if (p.rows == 0) return;
  MLA_RUN(cache, cache_gather, p);
}

MLA_OP(stage_rows, Tensor cache, Tensor block_table, Tensor lengths, OptionalTensor staged_table, int64_t format,
       Written out) {
  StageProblem p{};
  p.cache = expect_cache(cache, "cache", format, "format", cache);
  if (p.cache.format.scale != Scale::fp32)
    reject("cache", "one of " + std::string(kFp8DsMla.name) + " rows", p.cache.format.name);
  p.block_table = expect<int32_t>(block_table, "block_table", {{"R"}, {"max_blocks"}}, cache, {&p.table_stride});
  p.requests = block_table.size(0);
  p.max_blocks = expect_int32(block_table.size(1), "block_table", "blocks a request");
  const Dim R{"R", p.requests};
  p.lengths = expect<int32_t>(lengths, "lengths", {R}, cache);
  p.staged_table =
      expect<int32_t>(staged_table, "staged_table", {R, {"max_blocks", p.max_blocks}}, cache, {&p.staged_stride});
  p.staged = expect_cache(out, "out", kFormatCount, "out", cache, true);
  const int64_t blocks = p.requests * p.max_blocks;
  if (p.staged.block_size != p.cache.block_size)
    reject("out", "of the cache's block size, " + std::to_string(p.cache.block_size), describe(out));
  if (!staged_table && p.staged.blocks < blocks)
    reject("out", "of R * max_blocks = " + std::to_string(blocks) + " blocks or more", describe(out));
  if (reinterpret_cast<uintptr_t>(p.staged.data) % 16 != 0 || p.staged.block_stride % 16 != 0)
    reject("out", "of blocks that begin at multiples of 16 bytes", "others");
  // rows of a launch, and a cache has no more
  if (blocks > 0 && p.cache.block_size > kMaxSize / blocks)
    reject("block_table", "of R * max_blocks blocks that hold " + std::to_string(kMaxSize) + " rows or fewer",
           describe(block_table));
  if (blocks == 0) return;
  MLA_RUN(cache, stage_rows, p);
}

}  // namespace mla::bindings
