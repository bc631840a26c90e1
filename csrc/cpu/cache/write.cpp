// Writes tokens into the paged cache, quantised as its format wants it.
#include <cmath>
#include <cstring>

#include "cpu/common/parallel.h"
#include "mla/number.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

float widen(float x) { return x; }
float widen(Bf16 x) { return bf16_to_float(x.bits); }
float widen(F16 x) { return f16_to_float(x.bits); }

// A number that has the cache's type already keeps its bits, NaN included.
uint16_t bits_as(Code code, Bf16 x) { return code == Code::bf16 ? x.bits : float_to_f16(widen(x)); }
uint16_t bits_as(Code code, F16 x) { return code == Code::f16 ? x.bits : float_to_bf16(widen(x)); }
uint16_t bits_as(Code code, float x) { return code == Code::f16 ? float_to_f16(x) : float_to_bf16(x); }

// `scale` is what e4m3 numbers are divided by, and e2m1 numbers multiplied with.
template <typename Number>
void store(Code code, const Number* from, int count, float scale, uint8_t* to) {
  if (code == Code::e2m1) {
    for (int i = 0; i < count; i += 2)
      to[i / 2] =
          static_cast<uint8_t>(float_to_e2m1(widen(from[i]) * scale) | float_to_e2m1(widen(from[i + 1]) * scale) << 4);
    return;
  }
  if (code == Code::e4m3) {
    for (int i = 0; i < count; ++i) to[i] = float_to_e4m3(widen(from[i]) / scale);
    return;
  }
  for (int i = 0; i < count; ++i) {
    const uint16_t bits = bits_as(code, from[i]);
    memcpy(to + 2 * i, &bits, 2);
  }
}

template <typename Number>
void quantise_groups(const CacheFormat& format, bool power_of_two, const Number* latent, uint8_t* row,
                     uint8_t* scales) {
  for (int group = 0; group < format.scales(); ++group) {
    const Number* values = latent + group * format.group;
    float amax = 0.0f;
    for (int i = 0; i < format.group; ++i) amax = std::fmax(amax, std::fabs(widen(values[i])));  // leaves NaN out
    if (format.scale == Scale::e4m3) {
      const uint8_t scale = nvfp4_group_scale(amax);
      scales[nvfp4_scale(group)] = scale;
      store(format.code, values, format.group, 1.0f / e4m3_to_float(scale), row + group * format.group / 2);
      continue;
    }
    const float scale = group_scale(amax, power_of_two || format.scale == Scale::ue8m0);
    store(format.code, values, format.group, scale, row + group * format.group);
    if (format.scale == Scale::ue8m0)
      scales[group] = power_to_ue8m0(scale);
    else
      memcpy(scales + 4 * group, &scale, 4);
  }
  if (format.scale_padding > 0) memset(scales + format.scale_bytes() - format.scale_padding, 0, format.scale_padding);
}

template <typename Number>
void write_rows(const CacheWriteProblem& p) {
  const CacheFormat& format = p.cache.format;
  for_each_in_ranges(p.tokens, 8, [&](int64_t token) {
    const int64_t slot = p.slots[token];
    if (!p.cache.holds(slot)) return;
    uint8_t* row = p.cache.row(slot);
    const Number* latent = static_cast<const Number*>(p.latent) + token * p.latent_token;
    if (format.group > 0)
      quantise_groups(format, p.power_of_two, latent, row, p.cache.scales(slot));
    else
      store(format.code, latent, format.latent, p.scale, row);
    if (format.rope == 0) return;
    const Number* rope = static_cast<const Number*>(p.rope) + token * p.rope_token;
    store(format.rope_code, rope, format.rope, p.scale, row + format.rope_offset());
  });
}

}  // namespace

void cache_write(const CacheWriteProblem& p) {
  switch (p.source) {
    case Source::bf16:
      return write_rows<Bf16>(p);
    case Source::f16:
      return write_rows<F16>(p);
    case Source::fp32:
      return write_rows<float>(p);
  }
}

}  // namespace mla::cpu
