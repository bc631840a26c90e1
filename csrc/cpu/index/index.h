// What the driver and the kernels of the instruction sets agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/index.h"
#include "mla/limits.h"

namespace mla::cpu {

constexpr int kScoreTokens = 8;  // neighbours of one request that share the keys which one of them loads

// Some neighbouring tokens of one request, over some of its positions.
struct ScoreRange {
  int64_t token;
  int32_t tokens;  // at most kScoreTokens
  int32_t begin, end;
  float* scores;  // where the first token's score of position `begin` goes
  int64_t score_token;
};

struct IndexKernel {
  size_t workspace_bytes;  // aligned to 64
  void (*score)(const IndexProblem& problem, const ScoreRange& range, void* workspace);
};

extern const IndexKernel kPortableIndexKernel;
#ifdef MLA_X86
extern const IndexKernel kAvx2IndexKernel;
extern const IndexKernel kAvx512IndexKernel;
extern const IndexKernel kAvx512Bf16IndexKernel;
extern const IndexKernel kAmxBf16IndexKernel;
#endif

}  // namespace mla::cpu
