// What the drivers and the kernels of the instruction sets agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/backward.h"

namespace mla::cpu {

struct BackwardKernel {
  size_t workspace_bytes;  // aligned to 64
  // One query: its d_q and its contributions.
  void (*run)(const BackwardProblem& problem, int32_t query, void* workspace);
  // One row: adds the block's contributions.
  void (*sum_row)(const SumProblem& problem, int32_t row);
  // The product of two vectors of kValueDim bf16 numbers.
  float (*dot)(const uint16_t* a, const uint16_t* b);
};

extern const BackwardKernel kPortableBackwardKernel;
#ifdef MLA_X86
extern const BackwardKernel kAvx2BackwardKernel;
extern const BackwardKernel kAvx512BackwardKernel;
extern const BackwardKernel kAvx512Bf16BackwardKernel;
#endif

}  // namespace mla::cpu
