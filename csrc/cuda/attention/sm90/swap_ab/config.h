// The shape of the kernel for up to 16 or 32 heads, for the kernel and its launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/sm90/split_tokens.cuh"
#include "cuda/attention/sm90/swap_ab/fp8_rows.cuh"
#include "cuda/attention/sm90/swap_ab/nvfp4_rows.cuh"
#include "cuda/attention/sm90/swap_ab/plain_rows.cuh"
#include "cuda/attention/sm90/swap_ab/reduction.h"

namespace mla::cuda::sm90::swap_ab {

constexpr int kConsumerGroups = 2;  // warpgroups, each with its own tile
constexpr int kConsumerWarps = 4 * kConsumerGroups;
constexpr int kProducerWarps = 8;
constexpr int kThreads = 32 * (kConsumerWarps + kProducerWarps);

// Registers per thread at launch; setmaxnreg redistributes them. With up to 16 heads per CTA nothing may spill: a
// launch with local memory begins with a wait for it.
constexpr uint32_t kRegisters = 128;
template <Rows kRows, int kHeads>
constexpr uint32_t kConsumerRegisters = kHeads <= 16 ? 168 : 216;
template <Rows kRows, int kHeads>
constexpr uint32_t kProducerRegisters = 2 * kRegisters - kConsumerRegisters<kRows, kHeads>;

// Whether split tokens are combined by the kernel that is launched next. With up to 16 heads per CTA this kernel
// does it itself.
template <int kHeads>
constexpr bool kCombinedLater = kHeads > kClusterHeads;

// The layout of rows in shared memory, and their products.
template <Rows kRows, int kHeads>
using RowsOf = std::conditional_t<kRows == Rows::nvfp4_352, Nvfp4Rows<kHeads>,
                                  std::conditional_t<is_scaled(kRows) || kRows == Rows::fp8_tensor_576,
                                                     Fp8Rows<kRows, kHeads>, PlainRows<kRows, kHeads>>>;

template <Rows kRows, int kHeads>
struct Shared {
  using Own = RowsOf<kRows, kHeads>;

  typename Own::Memory rows;
  SwizzledRows<kHeads> probs[kConsumerGroups];
  alignas(8) float q_scale[Own::kQueries][kHeads];  // brings a score to base 2
  float warp_max[kConsumerGroups][4][kHeads];
  // The warpgroups' softmax statistics of a token, double-buffered by reduction.
  float total[2][kConsumerGroups][4][kHeads];
  float max_score[2][kConsumerGroups][4][kHeads];
  float row_max[2][kConsumerGroups][kHeads];
  float factor[kHeads];
  SplitResult split[kHeads];  // of a split token
  SplitTokens split_tokens;
  Barrier full[Own::kStages], empty[Own::kStages];
  Barrier q_full[Own::kQueries], q_empty[Own::kQueries];
  Barrier probs_free[kConsumerGroups];
  Barrier reduction_full[2], reduction_empty[2];  // double-buffered by round
  // Of the cluster: all CTAs have stored their split of the token; all warps have read what they combine.
  Barrier cluster_full, cluster_empty;
  uint32_t touched;  // what touch() returned: kept, or the compiler drops its loads
#ifdef MLA_RACECHECK
  Barrier groups_met;
#endif
};

template <Rows kRows, int kHeads>
constexpr int kSharedBytes = sizeof(Shared<kRows, kHeads>);

constexpr int kMostSharedBytes = 227 * 1024;  // of a CTA on sm_90
static_assert(kSharedBytes<Rows::fp8_ds_mla, 32> <= kMostSharedBytes &&
              kSharedBytes<Rows::nvfp4_352, 32> <= kMostSharedBytes &&
              kSharedBytes<Rows::nvfp4_352, 16> <= kMostSharedBytes &&
              kSharedBytes<Rows::nvfp4_352, 8> <= kMostSharedBytes &&
              kSharedBytes<Rows::fp8_ds_mla, 16> <= kMostSharedBytes &&
              kSharedBytes<Rows::fp8_tensor_576, 16> <= kMostSharedBytes &&
              kSharedBytes<Rows::bf16, 16> <= kMostSharedBytes && kSharedBytes<Rows::any_512, 16> <= kMostSharedBytes);
static_assert(kReductionHeads<32> * kReductionStride * sizeof(float) <= sizeof(Fp8Rows<Rows::fp8_ds_mla, 32>::Stage),
              "the reduction buffer takes the memory of a tile");

}  // namespace mla::cuda::sm90::swap_ab
