// The cut between the best of some candidates and the others, by histograms. A histogram counts the candidates between
// two keys (rank_key) in bins of equal width; the bin with the last one to be kept is what the next histogram divides.
// Scores that lie close to one another are told apart as well as others, as bins lie between the lowest and the
// highest of them.
#pragma once

#include <cstdint>

#include "cuda/index/sm90/lists.h"

namespace mla::cuda::index::sm90 {

constexpr int kBinBits = 11, kBins = 1 << kBinBits;

// Keys from `low` on, in bins of 2^shift.
struct Range {
  uint64_t low, high;
  int shift;

  __device__ Range(uint64_t low, uint64_t high) : low(low), high(high) {
    shift = max(0, 64 - kBinBits - __clzll(static_cast<int64_t>(high - low)));
  }
  __device__ bool holds(uint64_t key) const { return low <= key && key <= high; }
  __device__ uint32_t bin_of(uint64_t key) const { return static_cast<uint32_t>((key - low) >> shift); }
  // The keys of one bin.
  __device__ Range of_bin(uint32_t bin) const {
    const uint64_t first = low + (uint64_t{bin} << shift);
    return Range(first, min(high, first + ((uint64_t{1} << shift) - 1)));
  }
};

// Bins of equal width between two scores, for a first division.
struct Line {
  uint32_t highest;  // ordered; not less is the last bin
  float low, bins_per_score;

  __device__ Line(uint32_t lowest, uint32_t highest) : highest(highest), low(score_of(lowest)) {
    bins_per_score = (kBins - 1) / (score_of(highest) - low);
  }
  // Rises with the score, if not always by as much. (NaN becomes 0, where the scale is no number.)
  __device__ uint32_t bin_of(uint32_t score) const {
    if (score >= highest) return kBins - 1;
    return min(static_cast<uint32_t>(max(__float2int_rd((score_of(score) - low) * bins_per_score), 0)),
               uint32_t{kBins - 1});
  }
};

// What is kept: all of higher bins than this one, and of this one the keys from `least` on.
struct Cut {
  Line line;
  uint32_t bin;
  uint64_t least;

  __device__ bool keeps(const Candidate& c) const {
    const uint32_t own = line.bin_of(c.score);
    return own > bin || (own == bin && rank_key(c) >= least);
  }
};

struct Bin {
  uint32_t bin, above, count;  // how many candidates are in higher bins, and in this one
};

}  // namespace mla::cuda::index::sm90
