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
// Tiles whose changes of shifts are kept: one warpgroup decides those of tile i + 2 while the other may still have to
// apply those of tile i.
constexpr int kKept = 4;

// Registers per thread at launch; setmaxnreg redistributes them.
constexpr int kRegisters = 168;
constexpr int kConsumerRegisters = 240;
constexpr int kProducerRegisters = 24;
static_assert(kConsumerGroups * kConsumerRegisters + kProducerRegisters <= (kConsumerGroups + 1) * kRegisters);

template <Rows kRows>
struct Shared {
  static constexpr bool kScaled = is_scaled(kRows);
  static constexpr int kBytes = (kScaled ? kFp8DsMla : kFp8Tensor576).row_bytes();
  static constexpr int kRopeOffset = (kScaled ? kFp8DsMla : kFp8Tensor576).rope_offset();
  // From row to row: an odd number of pieces, so that eight rows lie in different banks.
  static constexpr int kPitch = (kBytes / kPieceBytes | 1) * kPieceBytes;

  // Rows as the cache has them.
  struct Stage {
    alignas(16) uint8_t rows[kTileTokens][kPitch];
    __device__ __forceinline__ uint32_t address() const { return cast_smem_ptr_to_uint(rows); }
  };

  SwizzledRows<kHeads> q[kGroups], q_rope;
  // P times the scales of two groups: a head's row has 64 bytes for each, of 64 tokens. Without scales all groups share
  // the first half of one tile. In 16 tokens, i and i + 8 are neighbours.
  SwizzledRows<kHeads> probs[kScaled ? kGroups / 2 : 1];
  Stage stages[kStages];
  uint8_t valid[kStages][kTileTokens];
  // Per head: q_scale, which brings a score to base 2, and shift: a weight is 2^(score * q_scale + shift). When shifts
  // change, the other warpgroup may still need those before: there are two versions.
  alignas(16) float2 heads[2][kHeads];
  uint32_t version;
  // Of the last kKept tiles: whether shifts have changed, and what that makes of the accumulators.
  uint32_t raised[kKept];
  alignas(8) float rescale[kKept][kHeads];
  // A warp's largest scores, with lifts; at a token's end its max logits, then its total.
  alignas(8) float of_warp[kConsumerGroups][4][kHeads];
  // At a token's end.
  alignas(8) float shift[kConsumerGroups][kHeads];
  float factor[kHeads];
  Barrier full[kStages], empty[kStages];
  Barrier decided, probs_full, probs_empty;
  uint32_t touched;  // what touch() returned: kept, or the compiler drops its loads
};

static_assert(sizeof(Shared<Rows::fp8_ds_mla>) <= 227 * 1024);

}  // namespace mla::cuda::sm90::m64_fp8
