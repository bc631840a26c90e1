// Positions to slots: a block a token. A warp takes some positions in a row, several to a lane, so that their loads and
// then those from the block table are on their way together.
#include <algorithm>

#include "cuda/common/divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/order.cuh"
#include "cuda/common/scan.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kLanePositions = 4;
constexpr int kWarpPositions = 32 * kLanePositions;

struct Problem : ConvertProblem {
  PositionDivisor entry_of;          // of the block table
  PositionDivisor run_of, round_of;  // of positions and of runs, in the ranks' round robin

  explicit Problem(const ConvertProblem& p)
      : ConvertProblem(p), entry_of(p.block_size), run_of(p.interleave), round_of(p.ranks) {}
};

__global__ void __launch_bounds__(kMaxThreads) convert_kernel(const __grid_constant__ Problem p) {
  __shared__ uint32_t warp_valid[2][kMaxWarps];  // of even and odd rounds: a barrier each is then enough
  let_next_kernel_begin();
  wait_for_kernel_before();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.x;
  const int32_t* positions = p.positions + token * p.position_stride;
  int32_t* slots = p.slots + token * p.slot_stride;
  const int64_t request = p.request[token];
  const bool known = request >= 0 && request < p.requests;
  const int32_t* table = p.block_table + (known ? request * p.table_stride : 0);
  const uint32_t topk = p.topk, max_blocks = p.max_blocks;
  uint32_t valid = 0;  // in the rounds so far
  int parity = 0;
  for (uint32_t round = 0; round < topk; round += blockDim.x * kLanePositions, parity ^= 1) {
    const uint32_t first = round + warp * kWarpPositions + lane;
    const int32_t left = static_cast<int32_t>(topk - first);  // may be negative
    const int32_t* lane_positions = positions + first;
    int32_t* lane_slots = slots + first;
    uint32_t position[kLanePositions], entry[kLanePositions];  // negative ones are beyond INT32_MAX
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) position[i] = 32 * i < left ? lane_positions[32 * i] : -1;
    if (p.ranks > 1) {
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        const uint32_t run = p.run_of(position[i]), round_robin = p.round_of(run);
        const bool own = position[i] <= INT32_MAX && run - round_robin * p.ranks == uint32_t(p.rank);
        position[i] = own ? round_robin * p.interleave + (position[i] - run * p.interleave) : UINT32_MAX;
      }
    }

    // slot_of_position(), step by step, so that no load waits for what another one brings
    int32_t block[kLanePositions], slot[kLanePositions];
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      entry[i] = p.entry_of(position[i]);
      block[i] = known && position[i] <= INT32_MAX && entry[i] < max_blocks ? table[entry[i]] : -1;
    }
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      const int64_t wide = int64_t{block[i]} * p.block_size + (position[i] - entry[i] * p.block_size);
      slot[i] = block[i] < 0 || wide > INT32_MAX ? -1 : static_cast<int32_t>(wide);
    }

    uint32_t valid_lanes[kLanePositions], own_warp = 0, round_valid;
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      valid_lanes[i] = __ballot_sync(~0u, slot[i] >= 0);
      own_warp += __popc(valid_lanes[i]);
      if (!p.compact && 32 * i < left) lane_slots[32 * i] = slot[i];
    }
    uint32_t rank = valid + sum_before_warp(own_warp, round_valid, warp_valid[parity]);
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      if (p.compact && slot[i] >= 0) slots[rank + __popc(valid_lanes[i] & lanes_below())] = slot[i];
      rank += __popc(valid_lanes[i]);
    }
    valid += round_valid;
  }
  for (uint32_t i = valid + threadIdx.x; p.compact && i < topk; i += blockDim.x) slots[i] = -1;
  if (threadIdx.x == 0) p.counts[token] = valid;
}

}  // namespace

void convert_indices(const ConvertProblem& p, void* stream) {
  const int64_t warps = (int64_t{p.topk} + kWarpPositions - 1) / kWarpPositions;
  const int threads = static_cast<int>(std::clamp<int64_t>(32 * warps, 32, kMaxThreads));
  launch_early(convert_kernel, p.tokens, threads, 0, stream, "convert_indices", Problem(p));
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"convert_indices", reinterpret_cast<const void*>(convert_kernel), kMaxThreads, 0}};
  return {entries, 1};
}

}  // namespace mla::cuda
