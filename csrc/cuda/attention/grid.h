// The blocks of an attention kernel: x is a group of heads, y a worker.
#pragma once

#include <cuda_runtime_api.h>

#include "mla/choice.h"
#include "mla/problem.h"

namespace mla::cuda {

inline dim3 attention_grid(const AttentionProblem& p, const Choice& choice) {
  return dim3(static_cast<unsigned>(blocks_for(p.heads, choice.heads_per_block)), p.workers);
}

}  // namespace mla::cuda
