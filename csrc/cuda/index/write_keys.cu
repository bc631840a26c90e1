// Writes MXFP4 keys: a token a warp, four values a lane.
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kLaneValues = kIndexDim / 32;

__global__ void __launch_bounds__(kThreads) write_keys_kernel(const __grid_constant__ WriteKeysProblem p) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  uint8_t* const values = token < p.tokens ? p.values_of(token) : nullptr;
  if (!values) return;
  float x[kLaneValues], amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    x[i] = p.at(token, lane * kLaneValues + i);
    amax = fmaxf(amax, fabsf(x[i]));  // NaN is left out
  }
  constexpr int kGroupLanes = kMxGroup / kLaneValues;
#pragma unroll
  for (int distance = 1; distance < kGroupLanes; distance *= 2)
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
  const uint8_t scale = mxfp4_group_scale(amax);
  const float inverse = two_to(127 - scale);
#pragma unroll
  for (int i = 0; i < kLaneValues; i += 2)
    values[(lane * kLaneValues + i) / 2] = static_cast<uint8_t>(float_to_e2m1(__fmul_rn(x[i], inverse)) |
                                                                float_to_e2m1(__fmul_rn(x[i + 1], inverse)) << 4);
  if (lane % kGroupLanes == 0) p.scales_of(token)[lane / kGroupLanes] = scale;
}

}  // namespace

void write_mxfp4_keys(const WriteKeysProblem& p, void* stream) {
  launch(write_keys_kernel, (p.tokens + kWarps - 1) / kWarps, kThreads, 0, stream, "write_mxfp4_keys", p);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"write_mxfp4_keys", reinterpret_cast<const void*>(write_keys_kernel), kThreads, 0}};
  return {entries, 1};
}

}  // namespace mla::cuda
