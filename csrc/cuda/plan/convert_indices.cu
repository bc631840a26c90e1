// Positions to slots: a block a token.
#include "cuda/common/launch.h"
#include "cuda/common/scan.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) convert_kernel(const __grid_constant__ ConvertProblem p) {
  __shared__ ScanSpace<int32_t> scan;
  const int64_t token = blockIdx.x;
  const int32_t* positions = p.positions + token * p.position_stride;
  int32_t* slots = p.slots + token * p.slot_stride;
  const int64_t request = p.request[token];
  int32_t valid = 0;  // in the rounds so far
  for (int32_t round = 0; round < p.topk; round += kThreads) {
    const int32_t i = round + threadIdx.x;
    const int32_t slot = i < p.topk ? slot_of_position(p, request, positions[i]) : -1;
    int32_t found;
    const int32_t before = exclusive_sum(static_cast<int32_t>(slot >= 0), found, scan);
    if (!p.compact) {
      if (i < p.topk) slots[i] = slot;
    } else if (slot >= 0) {
      slots[valid + before] = slot;
    }
    valid += found;
  }
  for (int32_t i = valid + threadIdx.x; p.compact && i < p.topk; i += kThreads) slots[i] = -1;
  if (threadIdx.x == 0) p.counts[token] = valid;
}

}  // namespace

void convert_indices(const ConvertProblem& p, void* stream) {
  launch(convert_kernel, p.tokens, kThreads, 0, stream, "convert_indices", p);
}

KernelList convert_indices_kernels() {
  static const KernelEntry entries[] = {
      {"convert_indices", reinterpret_cast<const void*>(convert_kernel), kThreads, 0}};
  return {entries, 1};
}

}  // namespace mla::cuda
