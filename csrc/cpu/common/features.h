// Which instruction sets this CPU has, and whose kernels are in use.
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/backward/backward.h"
#include "cpu/index/index.h"

namespace mla::cpu {

// What is compiled for one instruction set.
struct KernelChoice {
  const AttentionKernel* attention;
  const IndexKernel* index;
  const BackwardKernel* backward;
  bool usable;  // by this CPU
};

// Every instruction set that the library has kernels for, the fastest first.
constexpr int kMaxKernels = 5;
int kernel_choices(KernelChoice choices[kMaxKernels]);

// The kernels in use: the fastest usable ones, unless some were selected.
KernelChoice active_kernels();

// The attention kernel for rows like these: the active one, or where that does not take them the next slower that does.
const AttentionKernel& attention_kernel(TileType tile);

// Selects kernels by name ("auto" for the fastest). False if there are none of that name that this CPU can run.
bool select_kernel(const char* name);

}  // namespace mla::cpu
