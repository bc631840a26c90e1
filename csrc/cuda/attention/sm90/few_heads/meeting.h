// Where two warpgroups' results meet: rows of a head's 512 sums.
#pragma once

#include "cuda/attention/sm90/tile.h"

namespace mla::cuda::sm90::few_heads {

// Heads at a time, as many as find room in a tile's place.
template <int kHeads>
constexpr int kMeetingHeads = kHeads < 16 ? kHeads : 16;

// A row, in numbers: four more than 512, for the sake of banks.
constexpr int kMeetingStride = kValueDim + 4;

}  // namespace mla::cuda::sm90::few_heads
