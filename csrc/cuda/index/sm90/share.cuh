// Which tiles of which tokens a CTA of the filter has: an equal share of all, whatever the lengths, which only the
// device knows.
#pragma once

#include <cstdint>

#include "cuda/common/scan.cuh"
#include "cuda/index/sm90/lists.h"

namespace mla::cuda::index::sm90 {

// Neighbouring tokens. Those of one request in a row are a run: they share its tiles.
template <int kTokens>
struct Group {
  int32_t request[kTokens];
  uint32_t scored[kTokens];

  __device__ Group(const Problem& p, int64_t group) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int64_t token = group * kTokens + i;
      const bool real = token < p.tokens;
      request[i] = real ? p.request[token] : -1;
      scored[i] = real ? p.scored(token) : 0;
    }
  }

  // Calls visit(first token, last token, its longest) for each run.
  template <typename Visit>
  __device__ __forceinline__ void each_run(Visit visit) const {
    int first = 0;
    uint32_t longest = 0;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      longest = max(longest, scored[i]);
      if (i + 1 == kTokens || request[i] != request[i + 1 < kTokens ? i + 1 : i]) {
        visit(first, i, longest);
        first = i + 1, longest = 0;
      }
    }
  }

  __device__ uint32_t tiles() const {
    uint32_t all = 0;
    each_run([&](int, int, uint32_t longest) { all += tiles_of(longest); });
    return all;
  }
};

struct Share {
  int32_t group;    // where it begins,
  uint32_t offset;  // so many of its tiles further,
  uint64_t tiles;   // and how many tiles it has
};

struct SharedShare {
  uint64_t warps[kMaxWarps];
  Share share;
};

// Every thread of the CTA calls it.
template <int kThreads, int kTokens>
__device__ __forceinline__ Share find_share(const Problem& p, SharedShare& s) {
  const int32_t groups = static_cast<int32_t>((p.tokens + kTokens - 1) / kTokens);
  const int32_t own = (groups + kThreads - 1) / kThreads;
  const int32_t first = min(static_cast<int32_t>(threadIdx.x) * own, groups), last = min(first + own, groups);
  uint64_t tiles = 0, all;
  for (int32_t group = first; group < last; ++group) tiles += Group<kTokens>(p, group).tiles();
  if (threadIdx.x == 0) s.share = {0, 0, 0};
  uint64_t before = exclusive_sum(tiles, all, s.warps);  // has a barrier
  // No CTA is idle between two that are not.
  const uint64_t ctas = min(uint64_t{gridDim.x}, all), cta = min(uint64_t{blockIdx.x}, ctas);
  const uint64_t begin = ctas ? all * cta / ctas : 0, end = ctas ? all * min(cta + 1, ctas) / ctas : 0;
  if (begin < end && before <= begin && begin < before + tiles) {
    for (int32_t group = first; group < last; ++group) {
      const uint32_t of_group = Group<kTokens>(p, group).tiles();
      if (begin < before + of_group) {
        s.share = {group, static_cast<uint32_t>(begin - before), end - begin};
        break;
      }
      before += of_group;
    }
  }
  __syncthreads();
  return s.share;
}

// Walks through a share. begin_group(group), run(group, first token, last token, first tile, last tile) for each run of
// it, end_group(group, whether the share has its first tile, its last tile).
template <int kTokens, typename Begin, typename Run, typename End>
__device__ __forceinline__ void walk(const Problem& p, Share share, Begin begin_group, Run run, End end_group) {
#pragma unroll 1
  for (; share.tiles > 0; ++share.group) {
    const Group<kTokens> group(p, share.group);
    const uint32_t all = group.tiles();
    if (all == 0) continue;
    const uint32_t stop = static_cast<uint32_t>(min(share.offset + share.tiles, uint64_t{all}));
    begin_group(share.group, group);
#pragma unroll 1
    for (int index = 0;; ++index) {
      const Group<kTokens> group(p, share.group);  // again: registers are dearer
      int run_first = 0, run_last = 0, runs = 0;
      uint32_t run_longest = 0, run_before = 0, before = 0;
      group.each_run([&](int first, int last, uint32_t longest) {
        if (runs++ == index) run_first = first, run_last = last, run_longest = longest, run_before = before;
        before += tiles_of(longest);
      });
      if (index == runs) break;
      const uint32_t from = max(share.offset, run_before), to = min(stop, run_before + tiles_of(run_longest));
      if (from < to) run(group, run_first, run_last, run_longest, from - run_before, to - run_before);
    }
    end_group(share.group, share.offset == 0, stop == all);
    share.tiles -= stop - share.offset;
    share.offset = 0;
  }
}

}  // namespace mla::cuda::index::sm90
