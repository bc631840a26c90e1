// Reads rows of the paged cache as bf16, or as fp16 where the cache holds that.
#include <cstring>

#include "cpu/common/parallel.h"
#include "mla/number.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

// e4m3 or e2m1 numbers times a scale, rounded; 16-bit numbers as they are.
void load(Code code, const uint8_t* from, int count, float scale, uint16_t* out) {
  if (code == Code::e2m1)
    for (int i = 0; i < count; ++i) out[i] = float_to_bf16(e2m1_to_float(from[i / 2] >> i % 2 * 4) * scale);
  else if (code != Code::e4m3)
    memcpy(out, from, count * 2);
  else
    for (int i = 0; i < count; ++i) out[i] = float_to_bf16(e4m3_to_float(from[i]) * scale);
}

float scale_of(Scale kind, const uint8_t* scales, int group) {
  if (kind == Scale::ue8m0) return ue8m0_to_float(scales[group]);
  if (kind == Scale::e4m3) return e4m3_to_float(scales[nvfp4_scale(group)]);
  float scale;
  memcpy(&scale, scales + 4 * group, 4);
  return scale;
}

}  // namespace

void cache_gather(const CacheGatherProblem& p) {
  const CacheFormat& format = p.cache.format;
  for_each_in_ranges(p.rows, 16, [&](int64_t i) {
    uint16_t* out = p.out + i * p.out_row;
    const int64_t slot = p.slots[i];
    if (!p.cache.holds(slot)) {
      memset(out, 0, format.head_dim() * 2);
      return;
    }
    const uint8_t* row = p.cache.row(slot);
    if (format.group == 0) load(format.code, row, format.latent, p.scale, out);
    for (int group = 0; group < format.scales(); ++group)
      load(format.code, row + group * format.latent_bytes() / format.scales(), format.group,
           scale_of(format.scale, p.cache.scales(slot), group), out + group * format.group);
    load(format.rope_code, row + format.rope_offset(), format.rope, p.scale, out + format.latent);
  });
}

}  // namespace mla::cpu
