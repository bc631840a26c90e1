// What the backward needs to know of a token and head besides its rows. One head per warp.
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/ops.h"
#include "mla/number.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaProblem p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (item >= p.tokens * p.heads) return;
  const int64_t token = item / p.heads;
  const auto head = static_cast<int32_t>(item % p.heads);
  const uint16_t* out = p.out.at(token, head);
  const uint16_t* d_out = p.d_out.at(token, head);
  float dot = 0.0f;
#pragma unroll
  for (int dim = 8 * lane; dim < kValueDim; dim += 8 * 32) {
    const uint4 a = *reinterpret_cast<const uint4*>(out + dim), b = *reinterpret_cast<const uint4*>(d_out + dim);
    const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      dot += bits_float(left[i] << 16) * bits_float(right[i] << 16) +
             bits_float(left[i] & 0xffff0000u) * bits_float(right[i] & 0xffff0000u);
  }
  dot = sum_of_warp(dot);
  if (lane == 0) finish_delta(p, token, head, dot);
}

}  // namespace

void sparse_delta(const DeltaProblem& p, void* stream) {
  const auto ctas = static_cast<unsigned>((p.tokens * p.heads + kWarps - 1) / kWarps);
  launch(delta_kernel, dim3(ctas), kThreads, 0, stream, "sparse_delta", p);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {{"sparse_delta", reinterpret_cast<const void*>(delta_kernel), kThreads, 0}};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
