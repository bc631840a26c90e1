// The ops on the CPU, as the bindings call them.
#pragma once

#include "mla/index.h"
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
void index_scores(const IndexScoresProblem& problem);
void select_top(const SelectTopProblem& problem);

constexpr int kMaxMergeDim = 1024;

// Whether a plan, which may be a caller's and stale, covers every tile of these lists once and in order.
bool plan_fits(const PlanShape& shape, const PlanRow* rows, int workers);

// How lists are cut here.
constexpr int kPlanGranule = 16;  // slots; cuts may fall between any two such tiles
constexpr int kPlanTokenUnits = 1;
constexpr int kPlanMinPart = 8;           // tiles; 128 slots take several times as long as waking a thread and merging
constexpr int kPlanGoodPart = 32;         // tiles; parts of 512 slots are worth having more of them than threads,
constexpr int kPlanWorkersPerThread = 2;  // which take them in turn, as cores are seldom equally fast

inline PlanShape plan_shape(int32_t tokens, int32_t topk, int32_t extra_topk, const int32_t* length,
                            const int32_t* extra_length, bool whole_tokens) {
  return {tokens,          topk,         extra_topk,    kPlanGranule,
          kPlanTokenUnits, kPlanMinPart, kPlanGoodPart, kPlanWorkersPerThread,
          whole_tokens,    length,       extra_length};
}

}  // namespace mla::cpu
