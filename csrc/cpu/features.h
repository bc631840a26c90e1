// Which instruction sets this CPU has, and which of the attention kernels is in use.
#pragma once

#include "cpu/attention/attention.h"

namespace mla::cpu {

struct KernelChoice {
  const AttentionKernel* kernel;
  bool usable;  // by this CPU
};

// Every kernel in the library, the fastest first.
constexpr int kMaxKernels = 4;
int kernel_choices(KernelChoice choices[kMaxKernels]);

// The kernel in use: the fastest usable one, unless one was selected.
const AttentionKernel& active_kernel();

// Selects a kernel by name ("auto" for the fastest). False if there is none of that name that this CPU can run.
bool select_kernel(const char* name);

}  // namespace mla::cpu
