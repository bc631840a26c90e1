// Sparse attention for 17 to 32 heads on Hopper, with fp8 rows.
//
//   scores  S [32 heads, twice, x 64 tokens] = Q [64 x 576] K^T     heads are the rows of wgmma
//   values  O^T [512 dims x 32 heads] += V^T [512 x 64] P^T         dims are
//
//   load   | rows of i + 4 ...                                               |
//   score  | softmax i (scores of i + 1 begin) | scores i + 1 | softmax i + 1 ...
//   add    | values i - 1, converted on the way | values i ...
//
// Scores are sums of products of the codes themselves, and values become f16 in registers, just before they are
// multiplied. So there is no f16 copy of a tile, a tile waits as it came, and there is room for four.
//
// e4m3 times its scale is rounded to f16 for the values, once, by 2^-12 at most.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/some_heads/adder.cuh"
#include "cuda/attention/sm90/some_heads/config.h"
#include "cuda/attention/sm90/some_heads/loader.cuh"
#include "cuda/attention/sm90/some_heads/scorer.cuh"
#include "cuda/common/order.cuh"

namespace mla::cuda::sm90::some_heads {

// Block x: heads of a worker, y: the worker.
template <bool kLargest>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(s.full[i], kLoaderArrivals);
      init_barrier(s.empty[i], 3 * kWarps);
    }
    for (int i = 0; i < kWeights; ++i)
      init_barrier(s.weights_full[i], kWarps), init_barrier(s.weights_empty[i], 2 * kWarps);
  }
  __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_begin();
  const int head_begin = blockIdx.x * kHeads;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const int role = warp / kWarps, own = warp % kWarps;
  if (role == 0) {
    resize_registers<kScoringRegisters, kRegisters>();
    Scorer<kLargest> scorer{p, s, head_begin, own, lane};
    scorer.run(Worker(p, blockIdx.y, kTileTokens));
  } else if (role == 1) {
    resize_registers<kLoadingRegisters, kRegisters>();
    load_rows(s, Worker(p, blockIdx.y, kTileTokens), own, lane);
  } else {
    resize_registers<kAddingRegisters, kRegisters>();
    Adder adder{p, s, head_begin, role - 2, own, lane, {}};
    adder.run(blockIdx.y);
  }
}

}  // namespace mla::cuda::sm90::some_heads
