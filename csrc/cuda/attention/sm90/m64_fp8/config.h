// The shape of the kernel whose products are all FP8, for the kernel and its launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/sm90/tile.h"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/swizzle.cuh"

namespace mla::cuda::sm90::m64_fp8 {

constexpr int kHeads = 64;  // per CTA
constexpr int kConsumerGroups = 2;
constexpr int kConsumerWarps = 4 * kConsumerGroups;
constexpr int kProducerWarps = 4;
constexpr int kThreads = 32 * (kConsumerWarps + kProducerWarps);
constexpr int kWarpRows = kTileTokens / kProducerWarps;  // of a tile, per producer warp
constexpr int kStages = 4;

// Registers per thread at launch; setmaxnreg redistributes them.
constexpr int kRegisters = 168;
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;
static_assert(kConsumerGroups * kConsumerRegisters + kProducerRegisters <= (kConsumerGroups + 1) * kRegisters);

template <Rows kRows>
struct Shared {
  static constexpr bool kScaled = is_scaled(kRows);
  struct Stage {
    SwizzledRows<kTileTokens> fp8[kGroups];  // a token's 128 dims are a row of 128 bytes
    SwizzledRows<kTileTokens> rope;          // bf16; or e4m3, which fills half of a row
  };
  Stage stages[kStages];
  SwizzledRows<kHeads> q[kGroups], q_rope;
  // P times the scales of two groups: a head's row has 64 bytes for each, of 64 tokens. Without scales all groups share
  // the first half of one tile.
  SwizzledRows<kHeads> probs[kScaled ? kGroups / 2 : 1];
  // Of groups 2 * i and 2 * i + 1: [i][tokens 2 * j and 2 * j + 1][group][token].
  alignas(16) std::conditional_t<kScaled, float[kStages][kGroups / 2][kTileTokens / 2][2][2], Empty> scale;
  alignas(8) uint8_t valid[kStages][kTileTokens];
  alignas(16) uint32_t raised[4];    // whether a row max of a warp's heads has changed with the tile
  alignas(8) float rescale[kHeads];  // what that makes of the accumulators
  float row_max[kHeads];
  alignas(8) std::conditional_t<kScaled, float[kConsumerGroups][4][kTileTokens], Empty> lift;
  float q_scale[kHeads];  // brings a score to base 2
  // At a token's end.
  float own_max[kConsumerGroups][kHeads], total[kConsumerGroups][kHeads], max_score[kConsumerGroups][kHeads];
  alignas(8) float factor[kHeads];
  Barrier full[kStages], empty[kStages];
  Barrier probs_full, probs_empty;
  uint32_t touched;  // what touch() returned: kept, or the compiler drops its loads
};

static_assert(sizeof(Shared<Rows::fp8_ds_mla>) <= 227 * 1024);

}  // namespace mla::cuda::sm90::m64_fp8
