#include "cpu/features.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace mla::cpu {
namespace {

constexpr int kNone = -1;
std::atomic<int> selected{kNone};  // among the choices

int find(const char* name) {
  KernelChoice choices[kMaxKernels];
  const int count = kernel_choices(choices);
  for (int i = 0; i < count; ++i)
    if (choices[i].usable && (!strcmp(name, "auto") || !strcmp(name, choices[i].attention->name))) return i;
  return kNone;
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
  choices[count++] = {&kAvx512Bf16Kernel, &kAvx512Bf16IndexKernel, bf16};
  choices[count++] = {&kAvx512Kernel, &kAvx512IndexKernel, avx512};
  choices[count++] = {&kAvx2Kernel, &kAvx2IndexKernel, avx2};
#endif
  choices[count++] = {&kPortableKernel, &kPortableIndexKernel, true};
  return count;
}

KernelChoice active_kernels() {
  int index = selected.load(std::memory_order_relaxed);
  if (index == kNone) {
    index = find("auto");
    selected.store(index, std::memory_order_relaxed);
  }
  KernelChoice choices[kMaxKernels];
  kernel_choices(choices);
  return choices[index];
}

bool select_kernel(const char* name) {
  const int index = find(name);
  if (index != kNone) selected.store(index, std::memory_order_relaxed);
  return index != kNone;
}

}  // namespace mla::cpu
