// Merging results over disjoint sets of slots by their lse, for one row of one head.
#pragma once

#include <cmath>
#include <cstdint>

#include "mla/number.h"

namespace mla::cpu {

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return bf16_to_float(x); }

// sum[0 .. dim) = the merged row; returns its lse. `out` and `lse` of part i lie i strides on. A part with an
// lse of -inf weighs nothing, whatever its row holds.
template <typename Value>
float merge_rows(int parts, int dim, const Value* out, int64_t out_stride, const float* lse, int64_t lse_stride, float* sum) {
  float largest = -INFINITY;
  for (int i = 0; i < parts; ++i) largest = std::fmax(largest, lse[i * lse_stride]);
  const float reference = largest == -INFINITY ? 0.0f : largest;  // -inf minus -inf would be NaN
  float total = 0.0f;
  for (int i = 0; i < parts; ++i) total += std::exp(lse[i * lse_stride] - reference);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  for (int d = 0; d < dim; ++d) sum[d] = 0.0f;
  for (int i = 0; i < parts; ++i) {
    const float weight = std::exp(lse[i * lse_stride] - reference) * inverse;
    if (weight == 0.0f) continue;
    const Value* row = out + i * out_stride;
    for (int d = 0; d < dim; ++d) sum[d] += weight * widen(row[d]);
  }
  return reference + std::log(total);  // -inf where there was nothing
}

}  // namespace mla::cpu
