// The ops on the CPU, as the bindings call them.
#pragma once

#include "mla/plan.h"
#include "mla/problem.h"

namespace mla::cpu {

void sparse_attention(const AttentionProblem& problem);
void make_plan(const PlanShape& shape, PlanRow* rows, int workers);
template <typename Value>
void merge_partials(const MergeProblem<Value>& problem);
void cache_write(const CacheWriteProblem& problem);
void cache_gather(const CacheGatherProblem& problem);
void convert_indices(const ConvertProblem& problem);

constexpr int kMaxMergeDim = 1024;

// How lists are cut here: anywhere at a multiple of 16 slots, into parts of about 128 or more, which take several
// times as long as waking a thread and merging. Threads take parts in turn, two each where those have 512 slots or more: cores
// are seldom equally fast.
constexpr int kPlanGranule = 16;
constexpr int kPlanMinPart = 8;
constexpr int kPlanGoodPart = 32;
constexpr int kPlanWorkersPerThread = 2;

inline PlanShape plan_shape(int32_t tokens, int32_t topk, int32_t extra_topk, const int32_t* length, const int32_t* extra_length,
                            bool whole_tokens) {
  return {tokens,        topk,         extra_topk, kPlanGranule, kPlanMinPart, kPlanGoodPart, kPlanWorkersPerThread,
          whole_tokens, length, extra_length};
}

}  // namespace mla::cpu
