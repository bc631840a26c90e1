// What the kernel that scores keys is launched with, and the shape of its work.
#pragma once

#include <cstdint>

#include "cuda/common/divide.h"
#include "mla/index.h"

namespace mla::cuda::index {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerProcessor = 2;  // what registers are kept for
constexpr int kSides = 2;               // n sides of 8 keys that a warp multiplies with at once
constexpr int kStrip = 8 * kSides;      // keys
constexpr int kUnit = kWarps * kStrip;  // keys: a strip a warp
constexpr int kSteps = kIndexDim / 16;  // of the sum over dims
constexpr int kRowTiles = 4;            // of 16 heads, whose queries a warp keeps in registers

struct Problem : IndexScoresProblem {
  PositionDivisor table_index;
  bool queries_aligned;  // to the four numbers that a lane reads

  int32_t unscored;  // a token that sees no more positions than this gets no scores

  explicit Problem(const IndexScoresProblem& p, int32_t unscored)
      : IndexScoresProblem(p), table_index(p.cache.block_size), unscored(unscored) {
    const uintptr_t number = bytes_of(p.query_number);
    const auto starts = reinterpret_cast<uintptr_t>(p.queries) | p.query_token * number | p.query_head * number;
    queries_aligned = starts % (4 * number) == 0;
  }

  MLA_HOST_DEVICE int32_t length_of(int64_t token) const {
    const int32_t wanted = length[token];
    return wanted <= unscored ? 0 : wanted < positions ? wanted : positions;
  }
};

MLA_HOST_DEVICE int32_t units_of(int32_t keys) { return static_cast<int32_t>((int64_t{keys} + kUnit - 1) / kUnit); }

}  // namespace mla::cuda::index
