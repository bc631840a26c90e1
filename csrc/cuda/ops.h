// The ops on an NVIDIA GPU, as the bindings call them. `stream` is a cudaStream_t. They enqueue and return: no
// synchronisation, no allocation.
#pragma once

#include <string>

#include "mla/index.h"
#include "mla/plan.h"
#include "mla/problem.h"

namespace mla::cuda {

// Needs a plan and a workspace.
void sparse_attention(const AttentionProblem& problem, void* stream);
void make_plan(const PlanShape& shape, PlanRow* rows, int32_t workers, void* stream);
template <typename Value>
void merge_partials(const MergeProblem<Value>& problem, void* stream);
void cache_write(const CacheWriteProblem& problem, void* stream);
void cache_gather(const CacheGatherProblem& problem, void* stream);
void convert_indices(const ConvertProblem& problem, void* stream);
void index_scores(const IndexScoresProblem& problem, void* stream);
void select_top(const SelectTopProblem& problem, void* stream);

// The two halves of sparse_attention: one of these kernels, and the merge of the tokens that the plan cut, which the
// one for few heads does itself, 8 or 16 of them a block. Its wide form, of 32, leaves that to the second half.
void portable_attention(const AttentionProblem& problem, void* stream);
void few_heads_attention(const AttentionProblem& problem, void* stream, int heads_of_block, bool clusters);
void many_heads_attention(const AttentionProblem& problem, void* stream);
void few_heads_wide_attention(const AttentionProblem& problem, void* stream);
void merge_cut_tokens(const AttentionProblem& problem, void* stream);

// Rows that a plan should have for a GPU of this compute capability (its major number).
int default_workers(int major, int processors, int64_t tokens, int heads);
// What library.select_cuda_kernel() says; false if the name is none of its.
bool select_kernel(const std::string& name);

// How lists are cut here: at the border of any tile that a block has in shared memory at once. A token's beginning and
// end take about as long as three tiles (see token_units() in mla/plan.h).
inline PlanShape plan_shape(int32_t tokens, int32_t topk, int32_t extra_topk, const int32_t* length,
                            const int32_t* extra_length, bool whole_tokens) {
  constexpr int kGranule = 64, kTokenUnits = 3, kMinPart = 1, kGoodPart = 1, kWorkersPerProcessor = 1;
  return {tokens,       topk,   extra_topk,  kGranule, kTokenUnits, kMinPart, kGoodPart, kWorkersPerProcessor,
          whole_tokens, length, extra_length};
}

// Every kernel's registers, spills, shared memory and occupancy on the current device, as JSON.
std::string describe_kernels();

}  // namespace mla::cuda
