// Writes MXFP4 keys, a token at a time.
#include "cpu/common/parallel.h"
#include "mla/ops.h"

namespace mla::cpu {

void write_mxfp4_keys(const WriteKeysProblem& p) {
  for_each_in_ranges(p.tokens, 64, [&](int64_t token) {
    uint8_t* const values = p.values_of(token);
    if (!values) return;
    for (int group = 0; group < kIndexDim / kMxGroup; ++group) {
      float amax = 0.0f;
      for (int i = 0; i < kMxGroup; ++i) {
        const float size = __builtin_fabsf(p.at(token, group * kMxGroup + i));
        amax = size > amax ? size : amax;
      }
      const uint8_t scale = mxfp4_group_scale(amax);
      const float inverse = two_to(127 - scale);
      p.scales_of(token)[group] = scale;
      for (int dim = group * kMxGroup; dim < (group + 1) * kMxGroup; dim += 2)
        values[dim / 2] = static_cast<uint8_t>(float_to_e2m1(p.at(token, dim) * inverse) |
                                               float_to_e2m1(p.at(token, dim + 1) * inverse) << 4);
    }
  });
}

}  // namespace mla::cpu
