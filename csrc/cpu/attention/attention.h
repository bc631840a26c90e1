// The interface between the driver and the kernels of the instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/problem.h"
#include "mla/softmax.h"

namespace mla::cpu {

// Where a split of a token goes: the row of its first head. Those of the other heads follow.
struct Partial {
  float* out;          // [heads, 512]; null if the work is a whole token
  float* lse;          // [heads]
  float* max_logits;   // [heads]
  int64_t next_split;  // rows from one split's row of a head to the next split's
};

// One token, or a split of its list, for some of its heads.
struct TokenWork {
  int32_t token;
  int32_t head_begin, heads;  // at most kMaxWorkHeads
  int32_t tile_begin, tile_end, tile_slots;
  Partial partial;
};

constexpr int kMaxWorkHeads = 128;

struct AttentionKernel {
  const char* name;
  const char* needs;       // what the CPU must support, for people to read
  bool takes_f16;          // whether it takes tiles of f16 numbers
  size_t workspace_bytes;  // aligned to 64
  void (*run)(const AttentionProblem& problem, const TokenWork& work, void* workspace);
  // Combines the splits of one head of a token and writes the result.
  void (*combine)(const AttentionProblem& problem, int32_t token, int32_t head, int32_t splits, const Partial& first);
};

extern const AttentionKernel kPortableKernel;
#ifdef MLA_X86
extern const AttentionKernel kAvx2Kernel;
extern const AttentionKernel kAvx512Kernel;
extern const AttentionKernel kAvx512Bf16Kernel;
extern const AttentionKernel kAmxBf16Kernel;
#endif

}  // namespace mla::cpu
