// The top-k of each token's scores. A first pass counts scores by their upper bits, which leaves few candidates for the
// k-th largest. Once that one is found, a second pass takes all larger scores, and the first of its equals.
#include <algorithm>
#include <cstring>

#include "cpu/common/kept_buffer.h"
#include "cpu/common/parallel.h"
#include "mla/number.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

constexpr int kBits = 11;  // upper bits that are counted by: 8 KB of counters fit the L1 cache together with scores
constexpr int kShift = 32 - kBits;

// Numbers that are ordered as scores are. Both zeros are one number, and every NaN is the largest.
uint32_t ordered(float score) {
  const uint32_t bits = float_bits(score + 0.0f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

const uint32_t kNothing = ordered(-__builtin_inff());  // the score of a position without a key

// The k-th largest of the scores, and how many of its equals are among the k largest.
struct Threshold {
  uint32_t value;
  int32_t room;
};

Threshold kth_largest(const float* scores, int32_t count, int32_t k, KeptBuffer& buffer) {
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

int32_t select(const float* scores, int32_t count, int32_t topk, int32_t* chosen, KeptBuffer& buffer) {
  Threshold worst = kth_largest(scores, count, topk, buffer);
  if (worst.value <= kNothing) worst = {kNothing, 0};
  int32_t taken = 0;
  for (int32_t i = 0; i < count && taken < topk; ++i) {
    const uint32_t score = ordered(scores[i]);
    const bool equal = score == worst.value && worst.room > 0;
    worst.room -= equal;
    chosen[taken] = i;
    taken += equal || score > worst.value;
  }
  return taken;
}

}  // namespace

void select_top(const SelectTopProblem& p) {
  for_each_in_ranges(p.tokens, 1, [&](int64_t token) {
    thread_local KeptBuffer buffer;
    int32_t* chosen = p.chosen + token * p.chosen_token;
    const int32_t count = std::max(0, std::min(p.length[token], p.positions));
    int32_t taken = 0;
    if (count > p.topk) {
      if (p.topk > 0) taken = select(p.scores + token * p.score_token, count, p.topk, chosen, buffer);
    } else {
      for (; taken < count; ++taken) chosen[taken] = taken;
    }
    std::fill(chosen + taken, chosen + p.topk, -1);
  });
}

}  // namespace mla::cpu
