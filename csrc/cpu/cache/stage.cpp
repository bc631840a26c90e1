// Stages fp8_ds_mla rows for m64, with the same bits as on a GPU, NaN aside.
#include <cmath>
#include <cstring>

#include "cpu/common/parallel.h"
#include "mla/number.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

void store(uint16_t number, uint8_t* to) { memcpy(to, &number, 2); }

void stage_row(const uint8_t* row, uint8_t* to, uint8_t* power) {
  constexpr int kGroups = kFp8DsMla.scales();
  float scale[kGroups];
  memcpy(scale, row + kFp8DsMla.scale_offset(), sizeof(scale));
  float largest = std::fabs(scale[0]);
  for (const float one : scale) largest = std::fmax(largest, std::fabs(one));
  const int excess = excess_power(largest);
  const float down = two_to(-kUsualPower - excess);
  for (int i = 0; i < kLatent; ++i) {
    const float by = f16_to_float(float_to_f16(scale[i / kFp8DsMla.group] * down));
    store(float_to_f16(e4m3_to_float(row[i]) * by), to + 2 * i);
  }
  for (int i = 0; i < kRope; ++i) {
    uint16_t rope;
    memcpy(&rope, row + kFp8DsMla.rope_offset() + 2 * i, 2);
    if (excess != 0) rope = float_to_bf16(bf16_to_float(rope) * two_to(-excess));
    store(rope, to + kStaged.rope_offset() + 2 * i);
  }
  *power = static_cast<uint8_t>(excess);
}

}  // namespace

void stage_rows(const StageProblem& p) {
  for (int64_t request = 0; request < p.requests; ++request)
    for_each_in_ranges(p.rows(request), 8, [&](int64_t row) {
      int64_t from, to;
      if (p.find(request, row, from, to)) stage_row(p.cache.row(from), p.staged.row(to), p.staged.scales(to));
    });
}

}  // namespace mla::cpu
