// The shape of the portable backward kernel, for the kernel and its launch.
#pragma once

#include <cstdint>

#include "mla/backward.h"

namespace mla::cuda::portable_backward_kernel {

constexpr int kHeads = kPortableGroupHeads;  // per CTA: two m16n8k16 products high
constexpr int kTile = 16;                    // entries whose rows are in shared memory at once
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kHeads == 32 && kTile == 16 && kWarps == 8, "a warp has 16 heads by 8 entries of one of two products");

// Row strides against bank conflicts. Rows of 16-bit numbers are an odd number of 16-byte pieces long, so that the
// eight rows of an ldmatrix tile lie in different banks. Rows of fp32 numbers are 24 more than a multiple of 32 numbers
// long, so that half a warp's pairs do.
constexpr int kRowStride = kHeadDim + 8;
constexpr int kValueStride = kValueDim + 8;
constexpr int kScoreStride = kTile + 8;

struct Shared {
  alignas(16) uint16_t q[kHeads][kRowStride];
  alignas(16) uint16_t d_out[kHeads][kValueStride];
  alignas(16) uint16_t rows[kTile][kRowStride];
  alignas(16) float scores[kHeads][kScoreStride];
  alignas(16) float d_probs[kHeads][kScoreStride];
  alignas(16) uint16_t probs[kHeads][kScoreStride];  // P
  alignas(16) uint16_t d_scores[kHeads][kScoreStride];
  float lse2[kHeads], delta[kHeads];
  bool valid[kTile];
};
static_assert(sizeof(Shared) <= 99 * 1024, "what sm_89 and sm_120 let a CTA have");

}  // namespace mla::cuda::portable_backward_kernel
