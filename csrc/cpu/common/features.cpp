#include "cpu/common/features.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#ifdef MLA_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace mla::cpu {
namespace {

#ifdef MLA_X86
// Whether there are tiles for bf16, and the kernel lets this process use them: it has to be asked once, as they make
// its threads' saved state 8 KB larger.
bool tiles_usable() {
#ifdef __linux__
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & kAmxBf16) || !(edx & kAmxTile)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

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
  static const bool amx = bf16 && tiles_usable();
  choices[count++] = {&kAmxBf16Kernel, &kAmxBf16IndexKernel, &kAvx512Bf16BackwardKernel, amx};
  choices[count++] = {&kAvx512Bf16Kernel, &kAvx512Bf16IndexKernel, &kAvx512Bf16BackwardKernel, bf16};
  choices[count++] = {&kAvx512Kernel, &kAvx512IndexKernel, &kAvx512BackwardKernel, avx512};
  choices[count++] = {&kAvx2Kernel, &kAvx2IndexKernel, &kAvx2BackwardKernel, avx2};
#endif
  choices[count++] = {&kPortableKernel, &kPortableIndexKernel, &kPortableBackwardKernel, true};
  return count;
}

namespace {

int active_index() {
  int index = selected.load(std::memory_order_relaxed);
  if (index == kNone) {
    index = find("auto");
    selected.store(index, std::memory_order_relaxed);
  }
  return index;
}

}  // namespace

KernelChoice active_kernels() {
  KernelChoice choices[kMaxKernels];
  kernel_choices(choices);
  return choices[active_index()];
}

const AttentionKernel& attention_kernel(TileType tile) {
  KernelChoice choices[kMaxKernels];
  kernel_choices(choices);
  int index = active_index();
  // the last one, portable, takes everything
  const bool f16 = tile == TileType::f16_576 || tile == TileType::staged_576;
  while (f16 && !(choices[index].usable && choices[index].attention->takes_f16)) ++index;
  return *choices[index].attention;
}

bool select_kernel(const char* name) {
  const int index = find(name);
  if (index != kNone) selected.store(index, std::memory_order_relaxed);
  return index != kNone;
}

}  // namespace mla::cpu
