// The best of some scores. A first pass counts scores by their upper bits, which leaves few candidates for the k-th
// largest. Once that one is found, a second pass takes all larger scores, and the first of its equals.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/common/kept_buffer.h"
#include "mla/number.h"

namespace mla::cpu {

// Numbers that are ordered as scores are. Both zeros are one number, and every NaN is the largest.
inline uint32_t ordered(float score) {
  const uint32_t bits = float_bits(score + 0.0f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A score of that order.
inline float score_of(uint32_t ordered) { return bits_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered); }

constexpr uint32_t kNothing = 0x007fffffu;  // ordered(-inf): the score of a position without a key

// The k-th largest of the scores, and how many of its equals are among the k largest.
struct Threshold {
  uint32_t value;
  int32_t room;
};

inline Threshold kth_largest(const float* scores, int32_t count, int32_t k, KeptBuffer& buffer) {
  constexpr int kBits = 11;  // that are counted by: 8 KB of counters fit the L1 cache together with scores
  constexpr int kShift = 32 - kBits;
  int32_t counts[1 << kBits] = {};
  for (int32_t i = 0; i < count; ++i) ++counts[ordered(scores[i]) >> kShift];
  int32_t bucket = (1 << kBits) - 1, left = k;
  while (counts[bucket] < left) left -= counts[bucket--];

  uint32_t* candidates = static_cast<uint32_t*>(buffer.get(sizeof(uint32_t) * (counts[bucket] + 1)));
  int32_t found = 0;
  for (int32_t i = 0; i < count; ++i) {
    candidates[found] = ordered(scores[i]);  // the buffer has room for one more than the candidates
    found += static_cast<int32_t>(candidates[found] >> kShift) == bucket;
  }
  std::nth_element(candidates, candidates + left - 1, candidates + found, [](uint32_t a, uint32_t b) { return a > b; });
  const uint32_t value = candidates[left - 1];
  // what lies before the k-th largest is no smaller
  return {value, static_cast<int32_t>(std::count(candidates, candidates + left, value))};
}

// Calls take(n, i) for the n-th score that is chosen, of number i, in rising order; a later call for n replaces it. The
// k-th largest of the scores is `last`, but nothing that is -inf is chosen. Returns how many are.
template <typename Take>
int32_t take_best(const float* scores, int32_t count, int32_t k, Threshold last, Take take) {
  if (last.value <= kNothing) last = {kNothing, 0};
  int32_t taken = 0;
  for (int32_t i = 0; i < count && taken < k; ++i) {
    const uint32_t score = ordered(scores[i]);
    const bool equal = score == last.value && last.room > 0;
    last.room -= equal;
    take(taken, i);
    taken += equal || score > last.value;
  }
  return taken;
}

}  // namespace mla::cpu
