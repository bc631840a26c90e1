// Which keys of which tokens a block scores. Tokens come in groups of a fixed number of neighbours. Those of a group
// that belong to one request share its keys: a warp has some of the tokens, and all keys. Others come one after the
// other, and each warp has some of the token's keys. Either way the work is cut into equal shares, one a block,
// whatever the lengths, which only the device knows.
#pragma once

#include <cstdint>

#include "cuda/common/scan.cuh"
#include "cuda/index/problem.h"

namespace mla::cuda::index {

template <int kTokens>
struct Group {
  int64_t first;  // token
  int32_t longest = 0;
  bool alike;        // its tokens share keys
  int64_t cost = 0;  // in strips of one token that a warp scores

  __device__ Group(const Problem& p, int64_t index) : first(index * kTokens) {
    int32_t request[kTokens], length[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const bool real = first + i < p.tokens;
      request[i] = real ? p.request[first + i] : request[0];
      length[i] = real ? p.length_of(first + i) : 0;
    }
    alike = kTokens > 1 && first + 1 < p.tokens && p.candidate_blocks.size == 0;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      alike = alike && request[i] == request[0];
      longest = max(longest, length[i]);
      cost += units_of(length[i]);
    }
    if (alike) cost = int64_t{kTokens} * units_of(longest);
  }
};

// A block's share of all groups.
struct Share {
  int64_t group;   // where it begins,
  int64_t offset;  // so much of its cost further,
  int64_t cost;    // and what it costs, 0 if there is nothing to do
};

struct SharedShare {
  uint64_t warps[kMaxWarps];
  Share share;
};

template <int kTokens>
__device__ __forceinline__ Share find_share(const Problem& p, SharedShare& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t groups = (p.tokens + kTokens - 1) / kTokens, own = (groups + kWarps - 1) / kWarps;
  const int64_t first = min(warp * own, groups), last = min(first + own, groups);
  const auto cost = [&](int64_t group) -> uint64_t { return group < last ? Group<kTokens>(p, group).cost : 0; };

  uint64_t warp_cost = 0;
  for (int64_t group = first + lane; group < last; group += 32) warp_cost += cost(group);
  warp_cost = warp_sum(warp_cost);
  uint64_t all;
  uint64_t before = sum_before_warp(warp_cost, all, s.warps);
  // products of 64 bits: fewer than 2^40 strips, fewer than 2^20 blocks
  const uint64_t begin = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
  if (threadIdx.x == 0) s.share = {0, 0, 0};
  __syncthreads();
  if (begin < end && before <= begin && begin < before + warp_cost) {
    for (int64_t round = first; round < last; round += 32) {
      const uint64_t lane_cost = cost(round + lane);
      uint64_t sum = lane_cost;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      const uint32_t beyond = __ballot_sync(~0u, before + sum > begin);
      if (beyond) {
        if (lane == __ffs(beyond) - 1)
          s.share = {round + lane, static_cast<int64_t>(begin - (before + sum - lane_cost)),
                     static_cast<int64_t>(end - begin)};
        break;
      }
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
  return s.share;
}

}  // namespace mla::cuda::index
