// The CTAs of an attention kernel: x is a group of heads, y an entry of the plan.
#pragma once

#include <cuda_runtime_api.h>

#include "mla/problem.h"
#include "mla/schedule/launch.h"

namespace mla::cuda {

inline dim3 attention_grid(const AttentionProblem& p, const Launch& launch) {
  return dim3(static_cast<unsigned>(ceil_div(p.heads, launch.heads_per_cta)), p.ctas);
}

}  // namespace mla::cuda
