// The ops on an NVIDIA GPU, as the bindings call them. `stream` is a cudaStream_t. They enqueue and return: no
// synchronisation, no allocation.
#pragma once

#include <string>

#include "mla/problem.h"

namespace mla::cuda {

void cache_write(const CacheWriteProblem& problem, void* stream);
void cache_gather(const CacheGatherProblem& problem, void* stream);

// Every kernel's registers, spills, shared memory and occupancy on the current device, as JSON.
std::string describe_kernels();

}  // namespace mla::cuda
