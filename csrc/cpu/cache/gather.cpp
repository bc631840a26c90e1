// Reads rows of the paged cache as bf16.
#include <cstring>

#include "cpu/common/parallel.h"
#include "mla/number.h"
#include "mla/ops.h"

namespace mla::cpu {

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
    if (format.code == Code::bf16) {
      memcpy(out, row, format.latent_bytes());
    } else {
      for (int group = 0; group < format.scales(); ++group) {
        float scale;
        memcpy(&scale, row + format.scale_offset() + 4 * group, 4);
        for (int d = group * format.group; d < (group + 1) * format.group; ++d)
          out[d] = float_to_bf16(e4m3_to_float(row[d]) * scale);
      }
    }
    memcpy(out + format.latent, row + format.rope_offset(), format.rope * 2);
  });
}

}  // namespace mla::cpu
