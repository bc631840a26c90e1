// The shape of the kernel for 17 heads and more, for the kernel and its launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/sm90/convert_rows.cuh"
#include "cuda/attention/sm90/tile.h"

namespace mla::cuda::sm90::m64 {

constexpr int kHeads = 64;                 // per CTA: the rows of wgmma
constexpr int kGroupDims = kValueDim / 2;  // a consumer warpgroup's output dims
constexpr int kConsumerWarps = 8;
constexpr int kProducerWarps = 8;
constexpr int kThreads = 32 * (kConsumerWarps + kProducerWarps);
constexpr int kWarpRows = kTileTokens / kProducerWarps;  // of a tile, per producer warp

// Registers per thread at launch; setmaxnreg redistributes them. The first consumers also hold scores, the second ones
// addresses.
constexpr int kRegisters = 128;
constexpr int kScoringRegisters = 208;
constexpr int kAddingRegisters = 176;
constexpr int kProducerRegisters = 64;
static_assert(kScoringRegisters + kAddingRegisters + 2 * kProducerRegisters <= 4 * kRegisters);

// For rows with powers: what a column of scores (a token) needs. Rows in shared memory are divided by the usual power
// of two, and by an excess power 2^bias if f16 would not hold them otherwise.
struct Column {
  float power;  // 2^bias
  float bias;   // -inf if there is no row
};

constexpr int kStages = 2;

template <Rows kRows>
struct Shared {
  alignas(1024) uint8_t tiles[kStages][tile_bytes_of(kRows)];
  alignas(1024) uint8_t q[blocks_of(kRows)][kHeads * kRowBytes];
  SwizzledRows<kHeads> probs;
  alignas(16) std::conditional_t<has_powers(kRows), Column[kTileTokens], Empty> columns[kStages];
  alignas(8) uint8_t valid[kStages][kTileTokens];  // bit 0: the slot is valid; bit 1: the parity of its row's address
  alignas(8) uint8_t plain[kStages][kTileTokens];  // valid, without an excess power
  float q_scale[kHeads];
  float rescale[kHeads];
  float factor[2][kHeads];                    // of outputs, double-buffered by token
  Barrier raw_full[kStages][kProducerWarps];  // a producer warp's raw rows
  Barrier full[kStages], empty[kStages];      // tiles
  Barrier q_full, q_empty;
  Barrier probs_full, probs_empty;
  uint32_t touched;  // what touch() returned: kept, or the compiler drops its loads
};

static_assert(sizeof(Shared<Rows::fp8_ds_mla>) <= 227 * 1024 && sizeof(Shared<Rows::bf16>) <= 227 * 1024);

}  // namespace mla::cuda::sm90::m64
