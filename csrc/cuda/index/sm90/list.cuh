// The list in which a warp of the filter keeps what may be among a token's best.
#pragma once

#include <cstdint>

#include "cuda/common/order.cuh"
#include "cuda/common/scan.cuh"
#include "cuda/index/sm90/lists.h"

namespace mla::cuda::index::sm90 {

constexpr int kListBins = 512;

// What the lists of a token share.
struct ListToken {
  uint32_t bins[kListBins];   // of their candidates' scores
  float low, bins_per_score;  // of the bins; 0: they are not in use yet
  int32_t begun;              // somebody has chosen low and bins_per_score, or is about to
  float floor;                // topk scores are above it
};

// A warp's list, one of so many of a token.
template <int kStretches>
struct List {
  Candidate* candidates;
  int32_t capacity;
  int32_t count = 0, looked = 0;  // candidates, and how many of them have been looked at
  float floor = -INFINITY;        // the list's own: what isn't above it, and comes later, is none of the best
  float lowest = INFINITY, highest = -INFINITY;  // of those a lane has looked at
  float low = 0.0f, bins_per_score = 0.0f;       // of the token's bins; 0: those looked at are not in the bins

  // Candidates that join before they are looked at.
  static constexpr int kUnread = kStretches == 1 ? 384 : 128;

  __device__ static bool is_above(float score, float floor) { return !(score <= floor); }  // NaN is

  // Some of 64 scores join. `there` says which are. Returns whether the list wants to be looked at.
  __device__ __forceinline__ bool join(const float (&score)[2], const bool (&there)[2], float least, uint32_t first) {
    const bool joins[2] = {there[0] && is_above(score[0], least), there[1] && is_above(score[1], least)};
    const uint32_t all[2] = {__ballot_sync(~0u, joins[0]), __ballot_sync(~0u, joins[1])};
    if (joins[0])
      candidates[count + __popc(all[0] & lanes_below())] = {__float_as_uint(score[0]), first + threadIdx.x % 32};
    count += __popc(all[0]);
    if (joins[1])
      candidates[count + __popc(all[1] & lanes_below())] = {__float_as_uint(score[1]), first + 32 + threadIdx.x % 32};
    count += __popc(all[1]);
    return count - looked >= kUnread || count + 2 * 32 > capacity;
  }

  // Looks at what has joined: raises the floor, and makes room.
  __device__ __forceinline__ void look(ListToken& token, int32_t topk) {
    look_at(token, topk);
    if (bins_per_score > 0.0f) read_bins(token, topk);
    if (kStretches == 1) floor = fmaxf(floor, load(token.floor));
    if (count + kUnread + 2 * 32 > capacity) {
      shorten(load(token.floor));
      if (count + 2 * kUnread + 2 * 32 > capacity) keep_best(topk);
    }
  }

  __device__ static float load(const float& shared) { return *const_cast<const volatile float*>(&shared); }

  __device__ int bin_of(float score) const {
    const float bin = (score - low) * bins_per_score;
    return bin >= kListBins - 1 ? kListBins - 1 : bin > 0.0f ? static_cast<int>(bin) : 0;
  }

  // Visits the candidates from `begin` on, in their order, lane by lane.
  template <typename Visit>
  __device__ __forceinline__ void each(int32_t begin, Visit visit) const {
    constexpr int kAtOnce = 8;
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll 1
    for (; begin < count; begin += 32 * kAtOnce) {
      Candidate some[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (begin + 32 * i + lane < count) some[i] = candidates[begin + 32 * i + lane];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (begin + 32 * i < count) visit(some[i], begin + 32 * i + lane < count);
    }
    __syncwarp();
  }

  __device__ void look_at(ListToken& token, int32_t topk) {
    each(looked, [&](const Candidate& c, bool there) {
      const float score = __uint_as_float(c.score);
      if (!there) return;
      lowest = fminf(lowest, score), highest = fmaxf(highest, score);
      if (bins_per_score > 0.0f) atomicAdd(&token.bins[bin_of(score)], 1u);
    });
    looked = count;
    if (bins_per_score > 0.0f) return;
    if (count * kStretches >= topk + 128 && load(token.bins_per_score) == 0.0f) begin_bins(token);
    bins_per_score = load(token.bins_per_score);
    if (bins_per_score == 0.0f) return;
    __threadfence_block();
    low = load(token.low);
    each(0, [&](const Candidate& c, bool there) {
      if (there) atomicAdd(&token.bins[bin_of(__uint_as_float(c.score))], 1u);
    });
  }

  // The eighth of the lanes' largest: a few scores far above all others would leave no bins for these.
  __device__ static float eighth(float largest) {
    uint32_t rest = ordered(largest);
    for (int i = 1;; ++i) {
      const uint32_t most = __reduce_max_sync(~0u, rest), fewer = rest == most ? kMinusInfinity : rest;
      if (i == 8 || __all_sync(~0u, fewer == kMinusInfinity)) return score_of(most);
      rest = fewer;
    }
  }

  // Chooses the token's bins. What lies beyond them counts in the outermost.
  __device__ void begin_bins(ListToken& token) const {
    const float least = -eighth(-lowest), per_score = (kListBins - 1) / (eighth(highest) - least);
    if (threadIdx.x % 32 == 0 && per_score > 0.0f && per_score < INFINITY && atomicExch(&token.begun, 1) == 0) {
      token.low = least;
      __threadfence_block();
      *const_cast<volatile float*>(&token.bins_per_score) = per_score;
    }
    __syncwarp();
  }

  // The floor becomes a score that topk candidates exceed.
  __device__ void read_bins(ListToken& token, int32_t topk) const {
    constexpr int kOwn = kListBins / 32;
    const int lane = threadIdx.x % 32, lowest_bin = kListBins - (lane + 1) * kOwn;
    const volatile uint32_t* bins = token.bins;
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own += bins[lowest_bin + (i + lane) % kOwn];
    uint32_t sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    const uint32_t enough = __ballot_sync(~0u, sum >= static_cast<uint32_t>(topk));
    if (!enough) return;
    const int owner = __ffs(enough) - 1;
    // Of the owner's bins, the one: lanes take one each, the first the uppermost. Others may have added to a bin
    // since; none has fewer.
    const uint32_t above = __shfl_sync(~0u, sum - own, owner);
    const int uppermost = kListBins - 1 - owner * kOwn;
    uint32_t upto = lane < kOwn ? bins[uppermost - lane] : 0;
#pragma unroll
    for (int distance = 1; distance < kOwn; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, upto, distance);
      if (lane >= distance) upto += other;
    }
    const uint32_t reached = __ballot_sync(~0u, above + upto >= static_cast<uint32_t>(topk));
    const int bin = uppermost - min(__ffs(reached) - 1, kOwn - 1);
    if (bin == 0) return;
    float below = low + bin / bins_per_score;
    // less what rounding takes
    for (float step = (fabsf(below) + fabsf(low) + 1.0f / bins_per_score) * 0x1p-22f; bin_of(below) >= bin; step *= 2)
      below -= step;
    if (lane == 0 && below > load(token.floor)) *const_cast<volatile float*>(&token.floor) = below;
    __syncwarp();
  }

  // Drops what isn't above the floor.
  __device__ void shorten(float floor) {
    int32_t kept = 0;
    each(0, [&](const Candidate& c, bool there) {
      const bool keep = there && is_above(__uint_as_float(c.score), floor);
      const uint32_t all = __ballot_sync(~0u, keep);
      if (keep) candidates[kept + __popc(all & lanes_below())] = c;
      kept += __popc(all);
    });
    count = looked = kept;
    __syncwarp();
  }

  // Leaves the topk best, where many scores are equal or the bins are of no use: they are found bit by bit.
  __device__ void keep_best(int32_t topk) {
    uint32_t worst = 0;  // of the best, as an ordered score
#pragma unroll 1
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t tried = worst | 1u << bit;
      int32_t reach = 0;
      each(0, [&](const Candidate& c, bool there) {
        reach += __popc(__ballot_sync(~0u, there && ordered(__uint_as_float(c.score)) >= tried));
      });
      if (reach >= topk) worst = tried;
    }
    int32_t above = 0, kept = 0, equal = 0;
    each(0, [&](const Candidate& c, bool there) {
      above += __popc(__ballot_sync(~0u, there && ordered(__uint_as_float(c.score)) > worst));
    });
    const int32_t wanted = topk - above;
    each(0, [&](const Candidate& c, bool there) {
      const uint32_t score = there ? ordered(__uint_as_float(c.score)) : 0;
      const uint32_t equals = __ballot_sync(~0u, there && score == worst);
      const bool is_equal = there && score == worst && equal + __popc(equals & lanes_below()) < wanted;
      const bool keep = (there && score > worst) || is_equal;
      const uint32_t all = __ballot_sync(~0u, keep);
      if (keep) candidates[kept + __popc(all & lanes_below())] = c;
      kept += __popc(all), equal += __popc(equals);
    });
    count = looked = kept;
    // The list's later ones come after all of these.
    const float least = score_of(worst);
    floor = least == least ? fmaxf(floor, least) : INFINITY;
    __syncwarp();
  }

  __device__ ListEnd end(ListToken& token, int32_t topk) {
    look_at(token, topk);
    return {count, __reduce_min_sync(~0u, ordered(lowest)), __reduce_max_sync(~0u, ordered(highest)),
            ordered(load(token.floor))};
  }
};

}  // namespace mla::cuda::index::sm90
