// Division of positions by the block size, which is known at launch only.
#pragma once

#include <cstdint>

#include "mla/platform.h"

namespace mla::cuda {

// position / divisor == position * factor >> shift. It is exact for positions of 31 bits, because factor * divisor
// exceeds 2^shift by less than 2^(shift - 31).
struct PositionDivisor {
  uint32_t divisor, factor;
  int32_t shift = 31;

  explicit PositionDivisor(int64_t by) {
    constexpr int64_t kBeyondPositions = int64_t{1} << 31;  // a larger divisor gives 0 as well
    divisor = static_cast<uint32_t>(by < 1 ? 1 : by < kBeyondPositions ? by : kBeyondPositions);
    while (int64_t{1} << (shift - 31) < divisor) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }

  MLA_HOST_DEVICE uint32_t operator()(uint32_t position) const {
    return static_cast<uint32_t>(uint64_t{position} * factor >> shift);
  }
};

}  // namespace mla::cuda
