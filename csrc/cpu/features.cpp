#include "cpu/features.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace mla::cpu {
namespace {

std::atomic<const AttentionKernel*> selected{nullptr};

const AttentionKernel* find(const char* name) {
  KernelChoice choices[kMaxKernels];
  const int count = kernel_choices(choices);
  for (int i = 0; i < count; ++i)
    if (choices[i].usable && (!strcmp(name, "auto") || !strcmp(name, choices[i].kernel->name)))
      return choices[i].kernel;
  return nullptr;
}

}  // namespace

int kernel_choices(KernelChoice choices[kMaxKernels]) {
  int count = 0;
#ifdef MLA_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  choices[count++] = {&kAvx512Bf16Kernel, bf16};
  choices[count++] = {&kAvx512Kernel, avx512};
  choices[count++] = {&kAvx2Kernel, avx2};
#endif
  choices[count++] = {&kPortableKernel, true};
  return count;
}

const AttentionKernel& active_kernel() {
  const AttentionKernel* kernel = selected.load(std::memory_order_relaxed);
  if (!kernel) {
    kernel = find("auto");
    selected.store(kernel, std::memory_order_relaxed);
  }
  return *kernel;
}

bool select_kernel(const char* name) {
  const AttentionKernel* kernel = find(name);
  if (kernel) selected.store(kernel, std::memory_order_relaxed);
  return kernel != nullptr;
}

}  // namespace mla::cpu
