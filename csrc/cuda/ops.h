// What the files of the GPU's attention need of one another.
#pragma once

#include <string>

#include "mla/choice.h"
#include "mla/ops.h"

namespace mla::cuda {

// Each launches one of the kernels that mla/choice.h chooses from, as it says.
void portable_attention(const AttentionProblem& problem, const Choice& choice, void* stream);
void few_heads_attention(const AttentionProblem& problem, const Choice& choice, void* stream);
void few_heads_wide_attention(const AttentionProblem& problem, const Choice& choice, void* stream);
void many_heads_attention(const AttentionProblem& problem, const Choice& choice, void* stream);
// Merges the tokens that the plan cut, whose parts are rows of floats or CompactRows. few_heads_attention does that
// in its own kernel.
void merge_cut_tokens(const AttentionProblem& problem, bool compact, void* stream);

// The main kernels of the backward, for sparse_backward to choose from.
void portable_backward(const BackwardProblem& problem, void* stream);
void few_heads_backward(const BackwardProblem& problem, int processors, void* stream);
void many_heads_backward(const BackwardProblem& problem, int processors, void* stream);
// Heads whose contributions a device's kernel adds up before it writes them.
int32_t backward_group_heads(int device);
// Bytes that backward_order works in, on the current device.
int64_t order_scratch_bytes(int64_t pairs, int32_t rows);

// How many clusters of so many blocks of few_heads_attention the current device runs at once.
int few_heads_clusters(int blocks);
// What mla/choice.h needs to know of a device. It is asked once.
Device describe_device(int index);
Device describe_current_device();

// For tests and race detectors: which kernels the choice is made from, "auto" for all of them. False if the name is
// unknown; library.select_cuda_kernel() documents them.
bool select_kernel(const std::string& name);

// Every kernel's registers, spills, shared memory and occupancy on the current device, as JSON.
std::string describe_kernels();

}  // namespace mla::cuda
