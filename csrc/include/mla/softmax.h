// How a head's softmax ends, and how partial results over disjoint sets of slots are combined: for all kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "mla/platform.h"
#include "mla/problem.h"

namespace mla {

struct HeadResult {
  float lse;        // natural logarithm, without the sink; -inf if there was nothing to attend to
  float factor;     // what the accumulator is multiplied with
  float max_logit;  // NaN where lse is
};

// NaN if lse is: maxima leave NaN out, sums of exponentials don't.
MLA_HOST_DEVICE float max_logit_of(float lse, float largest) { return fabsf(lse) <= INFINITY ? largest : lse; }

// From the natural row maximum, the sum of e^(score - row_max), which is 0 if there was nothing to attend to, and the
// largest score.
MLA_HOST_DEVICE HeadResult finish_softmax(float row_max, float total, float max_logit) {
  if (total == 0.0f) return {-INFINITY, 0.0f, -INFINITY};
  const float lse = row_max + logf(total);
  return {lse, 1.0f / total, max_logit_of(lse, max_logit)};
}

// The sink takes part in the softmax without a value: outputs get the factor e^lse / (e^lse + e^sink). An output of
// zeros stays one.
MLA_HOST_DEVICE float with_sink(float factor, const AttentionProblem& p, int32_t head, float lse) {
  if (p.sink && lse > -INFINITY) factor /= 1.0f + expf(p.sink[head] - lse);
  return factor;
}

MLA_HOST_DEVICE void write_statistics(const AttentionProblem& p, int64_t token, int32_t head, float lse,
                                      float max_logit) {
  p.lse[p.offset(p.lse_strides, token, head)] = lse;
  if (p.max_logits) p.max_logits[p.offset(p.max_strides, token, head)] = max_logit;
}

// Partial results are summed with these weights, and the sum is divided by that of the weights: finish_softmax() with
// `max_lse`, the largest lse, as row_max. An empty one (lse -inf) weighs 0, and its row may hold anything.
MLA_HOST_DEVICE float combine_weight(float lse, float max_lse) {
  return lse == -INFINITY ? 0.0f : expf(lse - max_lse);
}

}  // namespace mla
