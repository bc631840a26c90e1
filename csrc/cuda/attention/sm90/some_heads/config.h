// The shape of the kernel for 17 to 32 heads with fp8 rows: what it is written with and the launch needs to know.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/tile.h"

namespace mla::cuda::sm90::some_heads {

constexpr int kHeads = 32;      // a block's
constexpr int kQueryRows = 64;  // of wgmma: a head's query is the sum of two of them
constexpr int kWarps = 4;       // of each role: a warpgroup scores, one loads, two add
constexpr int kThreads = 32 * 4 * kWarps;
constexpr int kLoaderRows = kTileTokens / kWarps;  // of a tile, a warp
constexpr int kWarpHeads = kHeads / kWarps;

// 128 registers a thread to begin with, handed round.
constexpr int kRegisters = 128;
constexpr int kScoringRegisters = 176;
constexpr int kLoadingRegisters = 48;
constexpr int kAddingRegisters = 144;
static_assert(kScoringRegisters + kLoadingRegisters + 2 * kAddingRegisters <= 4 * kRegisters);

constexpr int kStages = 4;   // rows, as they are in the cache
constexpr int kWeights = 2;  // tiles of weights

struct Shared {
  alignas(1024) uint8_t q[kGroups][kQueryRows * kRowBytes];  // e4m3
  alignas(1024) uint8_t q_rope[kQueryRows * kRowBytes];
  alignas(1024) uint8_t codes[kStages][kGroups][kTileTokens * kRowBytes];  // a group of 128 is a row of 128 bytes
  alignas(1024) uint8_t rope[kStages][kTileTokens * kRowBytes];
  alignas(1024) uint8_t weights[kWeights][kHeads * kRowBytes];
  float scale[kStages][kGroups][kTileTokens];
  uint32_t value_scale[kStages][kGroups][kTileTokens / 2];  // the same as f16, each token's divided by a power of two
  uint8_t held[kStages][kTileTokens];                       // whether the slot is one
  float q_scale[kHeads];
  alignas(8) float rescale[kWeights][kHeads];  // what sums are multiplied with before values are added, or in the end
  uint32_t raised[kWeights];                   // whether any of these, a byte for each warp's, is not 1
  uint64_t full[kStages], empty[kStages];
  uint64_t weights_full[kWeights], weights_empty[kWeights];
};

static_assert(sizeof(Shared) <= 227 * 1024);

}  // namespace mla::cuda::sm90::some_heads
