// Positions to slots: a block a token. A lane takes four positions in a row. All of the kernel's time is latency: of
// positions and request, and then of the block table. So a token's first positions are asked for before its request.
// In the other order the compiler, which knows that all threads have the same request, waits for it first.
#include <algorithm>

#include "cuda/common/divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/order.cuh"
#include "cuda/common/scan.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kLanePositions = 4;

struct Problem : ConvertProblem {
  PositionDivisor entry_of;          // of the block table
  PositionDivisor run_of, round_of;  // of positions and of runs, in the ranks' round robin

  explicit Problem(const ConvertProblem& p)
      : ConvertProblem(p), entry_of(p.table.block_size), run_of(p.interleave), round_of(p.ranks) {}
};

// A lane's positions from `first` on; UINT32_MAX, which is negative, where there are none. kAligned: a lane's lie in 16
// aligned bytes, all of them or none.
template <bool kAligned>
__device__ __forceinline__ void load(const int32_t* positions, uint32_t first, uint32_t topk,
                                     uint32_t (&lane_positions)[kLanePositions]) {
  if constexpr (kAligned) {
    uint4 four = make_uint4(UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX);
    if (first < topk) four = *reinterpret_cast<const uint4*>(positions + first);
    lane_positions[0] = four.x, lane_positions[1] = four.y, lane_positions[2] = four.z, lane_positions[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i)
      lane_positions[i] = first + i < topk ? static_cast<uint32_t>(positions[first + i]) : UINT32_MAX;
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) convert_kernel(const __grid_constant__ Problem p) {
  __shared__ uint32_t warp_valid[2][kMaxWarps];  // of even and odd rounds: a barrier each is then enough
  pdl_launch_dependents();
  pdl_wait();
  const int64_t token = blockIdx.x;
  const int32_t* positions = p.positions + token * p.position_stride;
  int32_t* slots = p.slots + token * p.slot_stride;
  const uint32_t topk = p.topk, max_blocks = p.table.max_blocks, block_size = p.table.block_size,
                 step = blockDim.x * kLanePositions;
  uint32_t position[kLanePositions], entry[kLanePositions];
  load<kAligned>(positions, threadIdx.x * kLanePositions, topk, position);
  const int64_t request = p.request[token];
  const bool known = request >= 0 && request < p.table.requests;
  const int32_t* table = p.table.blocks + (known ? request * p.table.stride : 0);
  uint32_t valid = 0;  // in the rounds so far
  int parity = 0;
  for (uint32_t round = 0; round < topk; round += step, parity ^= 1) {
    const uint32_t first = round + threadIdx.x * kLanePositions;
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
    uint32_t valid_lanes[kLanePositions], own_warp = 0, round_valid;
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      const int64_t wide = int64_t{block[i]} * block_size + (position[i] - entry[i] * block_size);
      slot[i] = block[i] < 0 || wide > INT32_MAX ? -1 : static_cast<int32_t>(wide);
      valid_lanes[i] = __ballot_sync(~0u, slot[i] >= 0);
      own_warp += __popc(valid_lanes[i]);
    }
    load<kAligned>(positions, first + step, topk, position);

    uint32_t rank = valid + sum_before_warp(own_warp, round_valid, warp_valid[parity]);
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) rank += __popc(valid_lanes[i] & lanes_below());
    // rank: how many valid ones come before the lane's
    const bool all_stay = (slot[0] | slot[1] | slot[2] | slot[3]) >= 0 && rank == first;
    if (kAligned && first < topk && (all_stay || !p.compact)) {
      *reinterpret_cast<int4*>(slots + first) = make_int4(slot[0], slot[1], slot[2], slot[3]);
    } else {
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        if (!p.compact && first + i < topk) slots[first + i] = slot[i];
        if (p.compact && slot[i] >= 0) slots[rank++] = slot[i];
      }
    }
    valid += round_valid;
  }
  for (uint32_t i = valid + threadIdx.x; p.compact && i < topk; i += blockDim.x) slots[i] = -1;
  if (threadIdx.x == 0 && p.counts) p.counts[token] = valid;
}

}  // namespace

void convert_indices(const ConvertProblem& p, void* stream) {
  const int64_t lanes = (int64_t{p.topk} + kLanePositions - 1) / kLanePositions;
  const int threads = static_cast<int>(std::clamp<int64_t>((lanes + 31) / 32 * 32, 32, kMaxThreads));
  const bool aligned = p.topk % kLanePositions == 0 && aligned16(p.positions, 4 * p.position_stride) &&
                       aligned16(p.slots, 4 * p.slot_stride);
  launch_pdl(aligned ? convert_kernel<true> : convert_kernel<false>, p.tokens, threads, 0, stream, "convert_indices",
             Problem(p));
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"convert_indices", reinterpret_cast<const void*>(convert_kernel<true>), kMaxThreads, 0},
      {"convert_indices, not aligned", reinterpret_cast<const void*>(convert_kernel<false>), kMaxThreads, 0},
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
