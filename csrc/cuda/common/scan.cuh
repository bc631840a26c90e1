// Prefix sums over the threads of a CTA: shuffles inside a warp, one round through shared memory. Latency is all that
// counts here. CUB's BlockScan needs the number of threads at compile time, and adds up the warps' sums one by one
// where redux.sync takes one instruction.
#pragma once

#include <cstdint>

namespace mla::cuda {

constexpr int kMaxWarps = 32;

// The lanes below this one.
__device__ __forceinline__ uint32_t lanes_below() { return (1u << threadIdx.x % 32) - 1; }

__device__ __forceinline__ uint32_t warp_sum(uint32_t value) { return __reduce_add_sync(~0u, value); }

__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// Returns the sum over the warps before the thread's own; `cta_total` becomes the sum over all. The last lane of each
// warp passes its warp's sum. Every thread of the CTA calls it. `warps` must be free since the last barrier.
template <typename T>
__device__ __forceinline__ T sum_before_warp(T warp_total, T& cta_total, T (&warps)[kMaxWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 31) warps[warp] = warp_total;
  __syncthreads();
  const T other = lane < blockDim.x / 32 ? warps[lane] : T{0};
  cta_total = warp_sum(other);
  return warp_sum(lane < warp ? other : T{0});
}

// The sum over the threads before this one; `total` becomes the sum over all.
template <typename T>
__device__ __forceinline__ T exclusive_sum(T value, T& total, T (&warps)[kMaxWarps]) {
  T sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(~0u, sum, distance);
    if (threadIdx.x % 32 >= distance) sum += other;
  }
  return sum_before_warp(sum, total, warps) + sum - value;
}

}  // namespace mla::cuda
