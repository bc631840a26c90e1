// What the driver and the kernels of the instruction sets agree on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/problem.h"
#include "mla/softmax.h"

namespace mla::cpu {

// Where a part of a token goes that other workers hold the rest of: its first head's row, the others' follow.
struct Partial {
  float* out;         // [heads, 512]; null where the work is a whole token
  float* lse;         // [heads]
  float* max_logits;  // [heads]
  int64_t next_part;  // rows from one part's row of a head to the next part's
};

// One token, or a part of its slot list, for some of its heads.
struct TokenWork {
  int32_t token;
  int32_t head_begin, heads;  // at most kMaxWorkHeads
  int32_t tile_begin, tile_end, tile_slots;
  Partial partial;
};

constexpr int kMaxWorkHeads = 128;

struct AttentionKernel {
  const char* name;
  const char* needs;       // of the CPU, for people to read
  bool takes_f16;          // whether it takes tiles of f16 numbers
  size_t workspace_bytes;  // aligned to 64
  void (*run)(const AttentionProblem& problem, const TokenWork& work, void* workspace);
  // Merges one head of a token from its parts and writes the result.
  void (*merge)(const AttentionProblem& problem, int32_t token, int32_t head, int32_t parts, const Partial& first);
};

extern const AttentionKernel kPortableKernel;
#ifdef MLA_X86
extern const AttentionKernel kAvx2Kernel;
extern const AttentionKernel kAvx512Kernel;
extern const AttentionKernel kAvx512Bf16Kernel;
extern const AttentionKernel kAmxBf16Kernel;
#endif

}  // namespace mla::cpu
