// Reductions over a warp. Every lane gets the result.
#pragma once

namespace mla::cuda {

__device__ __forceinline__ float max_of_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

}  // namespace mla::cuda
