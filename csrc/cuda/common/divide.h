// Division of positions by the block size, which is known only when a kernel is launched.
#pragma once

#include <cstdint>

#include "mla/platform.h"

namespace mla::cuda {

// position / divisor is position * factor >> shift: factor * divisor is 2^shift and less than 2^(shift - 31) more,
// which no position, having 31 bits, is large enough to feel.
struct PositionDivisor {
  uint32_t divisor, factor;
  int32_t shift = 31;

  explicit PositionDivisor(int64_t by) {
    constexpr int64_t kBeyondPositions = int64_t{1} << 31;  // the quotient is 0 from here on
    divisor = static_cast<uint32_t>(by < 1 ? 1 : by < kBeyondPositions ? by : kBeyondPositions);
    while (int64_t{1} << (shift - 31) < divisor) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }

  MLA_HOST_DEVICE uint32_t operator()(uint32_t position) const {
    return static_cast<uint32_t>(uint64_t{position} * factor >> shift);
  }
};

}  // namespace mla::cuda
