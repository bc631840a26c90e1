// Sums and maxima over the threads of a block of 1024.
#pragma once

#include <cstdint>

namespace mla::cuda {

template <typename T>
struct ScanSpace {
  T warps[32];
};

// The sum over the threads before this one; `total` becomes the sum over all. Every thread of the block calls it.
template <typename T>
__device__ T exclusive_sum(T value, T& total, ScanSpace<T>& space) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sum = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();
  if (lane == 31) space.warps[warp] = sum;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < 32; ++w) {
    if (w < warp) before += space.warps[w];
    total += space.warps[w];
  }
  return before + sum - value;
}

// The maximum over this thread and those before it.
template <typename T>
__device__ T inclusive_max(T value, ScanSpace<T>& space) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value = max(value, other);
  }
  __syncthreads();
  if (lane == 31) space.warps[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value = max(value, space.warps[w]);
  return value;
}

}  // namespace mla::cuda
