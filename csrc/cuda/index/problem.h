// What the kernel that scores keys is launched with, and the shape of its work.
#pragma once

#include <cstdint>

#include "cuda/common/divide.h"
#include "cuda/common/vector.cuh"
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
  PositionDivisor place_of;
  bool queries_aligned, keys_aligned;  // to the pieces that they are read in

  explicit Problem(const IndexScoresProblem& p) : IndexScoresProblem(p), place_of(p.cache.block_size) {
    const int64_t number = p.queries_fp32 ? 4 : 2;
    queries_aligned = (reinterpret_cast<uintptr_t>(p.queries) | static_cast<uintptr_t>(p.query_token * number) |
                       static_cast<uintptr_t>(p.query_head * number)) %
                          (4 * number) ==
                      0;
    // the scales' place in a block is a multiple of 128 bytes
    keys_aligned = aligned16(p.cache.data, p.cache.block_stride);
  }

  MLA_HOST_DEVICE int32_t length_of(int64_t token) const {
    const int32_t wanted = length[token];
    return wanted < 0 ? 0 : wanted < positions ? wanted : positions;
  }
};

MLA_HOST_DEVICE int32_t units_of(int32_t keys) { return static_cast<int32_t>((int64_t{keys} + kUnit - 1) / kUnit); }

}  // namespace mla::cuda::index
