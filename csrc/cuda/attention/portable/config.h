// The portable kernel's shape: what the kernel is written with and the launch needs to know.
#pragma once

#include <cstdint>

#include "mla/format.h"

namespace mla::cuda::portable {

constexpr int kHeads = 16;  // a CTA's heads: the rows of an m16n8k16 product
constexpr int kTile = 64;   // rows of the cache that are in shared memory at once
constexpr int kThreads = 256;
constexpr int kCtasPerProcessor = 2;  // what registers are kept for; plans for all heads fill them
constexpr int kWarps = kThreads / 32;
constexpr int kWarpTokens = kTile / kWarps;    // whose scores a warp computes
constexpr int kWarpDims = kValueDim / kWarps;  // output dims per warp
constexpr int kGroups = 4;                     // scale groups a row
constexpr int kGroupDims = kLatent / kGroups;

// Shared memory. Rows are 16 bytes longer than their numbers need, an odd number of 16-byte pieces, so that the
// eight rows of an ldmatrix tile lie in different banks; scores likewise for pairs of fp32.
constexpr int kRowStride = kHeadDim + 8;
constexpr int kScoreStride = kTile + 8;

struct Shared {
  alignas(16) uint16_t rows[kTile][kRowStride];  // e4m3 as bf16, without its fp32 scale
  alignas(16) uint16_t q[kHeads][kRowStride];
  alignas(16) float scores[kHeads][kScoreStride];  // then P
  alignas(16) float scale[kGroups][kTile];
  const uint8_t* row[kTile];  // in the cache; null where the slot is none
  const uint8_t* scales[kTile];
  float row_max[kHeads], total[kHeads], rescale[kHeads];
};
static_assert(sizeof(Shared) <= 99 * 1024, "what sm_89 and sm_120 let a CTA have");

}  // namespace mla::cuda::portable
