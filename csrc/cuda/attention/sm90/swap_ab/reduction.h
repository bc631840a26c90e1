// The reduction buffer, in which two warpgroups' outputs are added: a row of 512 accumulators per head.
#pragma once

#include "cuda/attention/sm90/tile.h"

namespace mla::cuda::sm90::swap_ab {

// Heads per round: as many as fit into the memory of one tile.
template <int kHeads>
constexpr int kReductionHeads = kHeads < 16 ? kHeads : 16;

// From row to row, in fp32 numbers. Four more than 512, against bank conflicts.
constexpr int kReductionStride = kValueDim + 4;

}  // namespace mla::cuda::sm90::swap_ab
