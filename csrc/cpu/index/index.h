// What the driver and the kernels of the instruction sets agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/index.h"

namespace mla::cpu {

constexpr int kMaxIndexHeads = 128;
constexpr int kScoreTokens = 8;  // neighbours of one request that share the keys which one of them loads

// Some neighbouring tokens of one request, over some of its positions.
struct ScoreStretch {
  int64_t token;
  int32_t tokens;  // at most kScoreTokens
  int32_t begin, end;
};

struct IndexKernel {
  size_t workspace_bytes;  // aligned to 64
  void (*score)(const IndexScoresProblem& problem, const ScoreStretch& stretch, void* workspace);
};

extern const IndexKernel kPortableIndexKernel;
#ifdef MLA_X86
extern const IndexKernel kAvx2IndexKernel;
extern const IndexKernel kAvx512IndexKernel;
extern const IndexKernel kAvx512Bf16IndexKernel;
extern const IndexKernel kAmxBf16IndexKernel;
#endif

}  // namespace mla::cpu
