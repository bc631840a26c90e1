// What the files of the GPU's attention need of one another.
#pragma once

#include <string>

#include "mla/ops.h"
#include "mla/schedule/launch.h"

namespace mla::cuda {

// Each launches one kernel as `launch` says, and combines the tokens that the plan split.
void portable_attention(const AttentionProblem& problem, const Launch& launch, void* stream);
void swap_ab_attention(const AttentionProblem& problem, const Launch& launch, void* stream);
void m64_attention(const AttentionProblem& problem, const Launch& launch, void* stream);
void m64_fp8_attention(const AttentionProblem& problem, const Launch& launch, void* stream);
// Combines the tokens that the plan split, whose splits are rows of floats or CompactRows.
void combine_split_tokens(const AttentionProblem& problem, bool compact, void* stream);

// The main kernels of the backward, for sparse_backward to choose from.
void portable_backward(const BackwardProblem& problem, void* stream);
void few_heads_backward(const BackwardProblem& problem, int processors, void* stream);
void many_heads_backward(const BackwardProblem& problem, int processors, void* stream);
// index_scores, for tokens alone that see more than `unscored` positions.
void index_scores(const IndexScoresProblem& problem, int32_t unscored, void* stream);
// Heads whose contributions a device's kernel adds up before it writes them.
int32_t backward_group_heads(int device);
// Bytes that backward_order works in, on the current device.
int64_t order_scratch_bytes(int64_t pairs, int32_t rows);

// How many clusters of so many CTAs of swap_ab_attention the current device runs at once.
int swap_ab_clusters(int ctas);
// It is asked once.
Gpu describe_gpu(int index);
Gpu describe_current_gpu();

// For tests and race detectors: which kernels run whatever a launch says, "auto" for those that it names. False if the
// name is unknown; library.select_cuda_kernel() documents them.
bool select_kernel(const std::string& name);

// Every kernel's registers, spills, shared memory and occupancy on the current device, as JSON.
std::string describe_kernels();

}  // namespace mla::cuda
