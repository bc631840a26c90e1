// The shape of the kernel for up to 16 heads: what it is written with and the launch needs to know.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/tile.h"

namespace mla::cuda::sm90::few_heads {

constexpr int kConsumerGroups = 2;  // warpgroups, each with its own tile
constexpr int kConsumerWarps = 4 * kConsumerGroups;
constexpr int kThreads = 32 * (kConsumerWarps + 8);
constexpr int kStages = kConsumerGroups;

// All 65536 registers: what a consumer has, the other half of the threads has not.
template <Code kCode>
constexpr int kConsumerRegisters = kCode == Code::e4m3 ? 152 : 128;
template <Code kCode>
constexpr int kGatherRegisters = 65536 / (kThreads / 2) - kConsumerRegisters<kCode>;

// A row of the buffer in which two warpgroups' results meet: four numbers longer than 512, so that eight dims of four
// pairs of heads lie in different banks.
constexpr int kExchangeStride = kValueDim + 4;

template <Code kCode, int kHeads>
struct Shared {
  static constexpr int kWeightCopies = kCode == Code::e4m3 ? kGroups : 1;  // one for each scale of a token

  alignas(1024) uint8_t tiles[kStages][kTileBytes];
  alignas(1024) uint8_t q[kBlocks][kHeads * kRowBytes];
  alignas(1024) uint8_t weights[kConsumerGroups][2][kWeightCopies][kHeads * kRowBytes];
  alignas(16) TokenInfo info[kStages][kTileTokens];
  float q_scale[kHeads];  // brings a score of q and codes to base 2
  float largest[kConsumerGroups][4][kHeads];
  // What the warpgroups found for a token, for tokens of even and odd number.
  float total[2][kConsumerGroups][4][kHeads];
  float highest[2][kConsumerGroups][4][kHeads];
  float reference[2][kConsumerGroups][kHeads];
  float factor[kHeads];
  uint64_t full[kStages], empty[kStages];
  uint64_t q_full, q_empty;
  uint64_t deposited;
};

template <Code kCode, int kHeads>
constexpr int kSharedBytes = sizeof(Shared<kCode, kHeads>);

static_assert(kSharedBytes<Code::e4m3, 16> <= 227 * 1024, "what sm_90 lets a block have");
static_assert(16 * kExchangeStride * sizeof(float) <= kTileBytes, "results meet in a tile's place");

}  // namespace mla::cuda::sm90::few_heads
