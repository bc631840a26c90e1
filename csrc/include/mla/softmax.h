// How a head's softmax ends, and how partial results over disjoint sets of slots are combined: for all kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "mla/platform.h"
#include "mla/problem.h"

namespace mla {

// `total` is the sum of e^(score - row_max). It is 0 if there was nothing to attend to.
MLA_HOST_DEVICE float lse_of(float row_max, float total) { return total == 0.0f ? -INFINITY : row_max + logf(total); }

// What the accumulator is multiplied with.
MLA_HOST_DEVICE float inverse_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

// NaN if lse is: maxima leave NaN out, sums of exponentials don't.
MLA_HOST_DEVICE float max_logit_of(float lse, float largest) { return fabsf(lse) <= INFINITY ? largest : lse; }

// The sink takes part in the softmax without a value: outputs get the factor e^lse / (e^lse + e^sink). An output of
// zeros stays one, and lse is that without the sink.
MLA_HOST_DEVICE float with_sink(float factor, const AttentionProblem& p, int32_t head, float lse) {
  if (p.sink && lse > -INFINITY) factor /= 1.0f + expf(p.sink[head] - lse);
  return factor;
}

// Partial results are summed with these weights, `max_lse` being the largest lse, and the sum is divided by that of the
// weights. An empty one (lse -inf) weighs 0, and its row may hold anything.
MLA_HOST_DEVICE float combine_weight(float lse, float max_lse) { return lse == -INFINITY ? 0.0f : expf(lse - max_lse); }

}  // namespace mla
