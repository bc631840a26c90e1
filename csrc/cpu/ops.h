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

// How a list is cut here: tiles of 64 slots, and no part under 128 (merging a part costs about as much).
constexpr int kPlanGranule = 64;
constexpr int kPlanMinPart = 2;

}  // namespace mla::cpu
