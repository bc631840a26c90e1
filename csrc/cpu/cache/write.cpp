// Writes tokens into the paged cache, quantised as its format wants it.
#include <cmath>
#include <cstring>

#include "cpu/common/parallel.h"
#include "mla/number.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

float load(const float* from, int i) { return from[i]; }
float load(const uint16_t* from, int i) { return bf16_to_float(from[i]); }

uint16_t load_bf16(const float* from, int i) { return float_to_bf16(from[i]); }
uint16_t load_bf16(const uint16_t* from, int i) { return from[i]; }  // the same bits, NaN included

template <typename Number>
void store_bf16(const Number* from, int count, uint8_t* to) {
  for (int i = 0; i < count; ++i) {
    const uint16_t bits = load_bf16(from, i);
    memcpy(to + 2 * i, &bits, 2);
  }
}

static_assert(kFp8DsMla.scale == Scale::fp32 && kFp8DsMla.scale_place == ScalePlace::in_row && kFormatCount == 2,
              "the only quantised format has fp32 scales in its rows; others need code here");

template <typename Number>
void quantise_row(const CacheFormat& format, bool power_of_two, const Number* latent, uint8_t* row) {
  for (int group = 0; group < format.scales(); ++group) {
    const Number* values = latent + group * format.group;
    float amax = 0.0f;
    for (int i = 0; i < format.group; ++i) amax = std::fmax(amax, std::fabs(load(values, i)));  // leaves NaN out
    const float scale = group_scale(amax, power_of_two);
    for (int i = 0; i < format.group; ++i) row[group * format.group + i] = float_to_e4m3(load(values, i) / scale);
    memcpy(row + format.scale_offset() + 4 * group, &scale, 4);
  }
}

template <typename Number>
void write_rows(const CacheWriteProblem& p) {
  const CacheFormat& format = p.cache.format;
  for_each_in_ranges(p.tokens, 8, [&](int64_t token) {
    const int64_t slot = p.slots[token];
    if (!p.cache.holds(slot)) return;
    uint8_t* row = p.cache.row(slot);
    const Number* latent = static_cast<const Number*>(p.latent) + token * p.latent_token;
    if (format.code == Code::bf16)
      store_bf16(latent, format.latent, row);
    else
      quantise_row(format, p.power_of_two, latent, row);
    store_bf16(static_cast<const Number*>(p.rope) + token * p.rope_token, format.rope, row + format.rope_offset());
  });
}

}  // namespace

void cache_write(const CacheWriteProblem& p) {
  p.source == Source::fp32 ? write_rows<float>(p) : write_rows<uint16_t>(p);
}

}  // namespace mla::cpu
