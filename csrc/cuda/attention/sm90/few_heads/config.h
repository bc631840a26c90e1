// The shape of the kernel for up to 16 heads: what it is written with and the launch needs to know.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/sm90/cut_tokens.cuh"
#include "cuda/attention/sm90/produce_bf16.cuh"
#include "cuda/attention/sm90/produce_e4m3.cuh"

namespace mla::cuda::sm90::few_heads {

constexpr int kConsumerGroups = 2;  // warpgroups, each with its own tile
constexpr int kConsumerWarps = 4 * kConsumerGroups;
constexpr int kStages = kConsumerGroups;

// Threads, and the registers they have: a block begins with as many for each and hands them round.
template <Code kCode>
struct Roles;

template <>
struct Roles<Code::e4m3> {
  static constexpr int kProducerWarps = RawRing::kConverterWarps;
  static constexpr int kTileArrivals = RawRing::kConverterWarps;
  static constexpr int kThreads = 32 * (kConsumerWarps + RawRing::kConverterWarps + RawRing::kLoaderWarps);
  static constexpr int kRegisters = 80;
  static constexpr int kConsumerRegisters = 144;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kLoaderRegisters = 40;
  static_assert(kConsumerRegisters + kProducerRegisters + kLoaderRegisters <= 3 * kRegisters);
};

template <>
struct Roles<Code::bf16> {
  static constexpr int kProducerWarps = RowCopier::kWarps;
  static constexpr int kTileArrivals = RowCopier::kArrivals;
  static constexpr int kThreads = 32 * (kConsumerWarps + RowCopier::kWarps);
};

// A row of the buffer in which two warpgroups' results meet: four numbers longer than 512, so that eight dims of four
// pairs of heads lie in different banks.
constexpr int kExchangeStride = kValueDim + 4;

struct NoRing {};

template <Code kCode, int kHeads>
struct Shared {
  static constexpr int kWeightCopies = kCode == Code::e4m3 ? kGroups : 1;  // one for each scale of a token

  alignas(1024) uint8_t tiles[kStages][kTileBytes];
  alignas(1024) uint8_t q[kBlocks][kHeads * kRowBytes];
  alignas(1024) uint8_t weights[kConsumerGroups][kWeightCopies][kHeads * kRowBytes];
  TileInfo info[kInfoTiles];
  std::conditional_t<kCode == Code::e4m3, RawRing, NoRing> ring;
  float q_scale[kHeads];  // brings a score of q and codes to base 2
  float largest[kConsumerGroups][4][kHeads];
  // What the warpgroups found for a token, for tokens of even and odd number.
  float total[2][kConsumerGroups][4][kHeads];
  float highest[2][kConsumerGroups][4][kHeads];
  float reference[2][kConsumerGroups][kHeads];
  float factor[kHeads];
  PartResult part[kHeads];  // of a cut token
  Joints joints[kConsumerWarps];
  uint64_t full[kStages], empty[kStages];
  uint64_t q_full, q_empty;
  uint64_t weights_free[kConsumerGroups];
  uint64_t deposited;
  uint64_t team;  // the workers of this block's team
};

template <Code kCode, int kHeads>
constexpr int kSharedBytes = sizeof(Shared<kCode, kHeads>);

static_assert(kSharedBytes<Code::e4m3, 16> <= 227 * 1024, "what sm_90 lets a block have");
static_assert(16 * kExchangeStride * sizeof(float) <= kTileBytes, "results meet in a tile's place");

}  // namespace mla::cuda::sm90::few_heads
