// The best of a token's candidates. A cluster of CTAs has a token; each of them has some of its lists, neighbours, so
// that candidates lie by rising position in every list, from list to list, and from CTA to CTA.
//
// Histograms of all CTAs' candidates find the cut (cut.cuh): each CTA adds up its share of the bins over the cluster.
// Then every CTA knows which of its own candidates are chosen, and their number in the CTAs before says where they go.
#pragma once

#include <cstdint>

#include "cuda/common/cluster.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/scan.cuh"
#include "cuda/index/sm90/cut.cuh"
#include "cuda/index/sm90/lists.h"

namespace mla::cuda::index::sm90 {

constexpr int kMaxCluster = 8;  // what every Hopper GPU runs
constexpr int kAtOnce = 4;
constexpr int kMembers = 256;                 // that a bin may have to be ranked one by one
constexpr int kMaxLists = kLists * kMaxCtas;  // of a token

template <int kThreads>
struct FinishShared {
  uint32_t bins[kBins];   // of this CTA's candidates
  uint32_t added[kBins];  // this CTA's share of the bins, over the cluster
  uint32_t of_share[kMaxCluster];
  uint32_t chosen[kMaxCluster];
  int32_t begin[kMaxLists + 1];  // of each of the CTA's lists, among its candidates
  uint32_t counts[8 * kThreads / 32];
  uint32_t warps[2][kMaxWarps];
  uint32_t lowest, highest, floor;
  uint64_t members[kMembers], all_members[kMembers], least;  // keys in the bin of the cut
  uint32_t own_members, count;
  Bin bin;
  Candidate candidates[];  // as many as there is room for
};

template <int kThreads>
struct Finisher {
  static constexpr int kWarps = kThreads / 32;

  const Problem& p;
  FinishShared<kThreads>& s;
  int64_t token;
  int rank, ctas;
  int64_t base;          // the token's first list
  int from_list, lists;  // this CTA's
  int32_t candidates;
  uint32_t least = 0;  // score that may be chosen
  bool kept = false;   // the candidates are in shared memory
  int buffer = 0;

  __device__ uint32_t sum_before(uint32_t value, uint32_t& all) {
    buffer ^= 1;
    return exclusive_sum(value, all, s.warps[buffer]);
  }

  __device__ void sync_cluster() const {
    if (ctas == 1) {
      __syncthreads();
    } else {
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }

  __device__ static uint32_t load_from(uint32_t shared_address, int rank) {
    uint32_t value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(cute::set_block_rank(shared_address, rank))
                 : "memory");
    return value;
  }
  __device__ static void store_to(uint32_t shared_address, int rank, uint32_t value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cute::set_block_rank(shared_address, rank)), "r"(value)
                 : "memory");
  }

  __device__ const Candidate* list(int i) const {
    return p.lists.candidates + list_index(from_list + i) * p.lists.capacity;
  }
  // Of a token's list.
  __device__ int64_t list_index(int i) const {
    const int shift = p.group == 1 ? 2 : p.group == 2 ? 1 : 0;  // 2^shift of each CTA of the filter
    return base + (i >> shift) * kLists + (i & ((1 << shift) - 1));
  }

  __device__ static Candidate load(const Candidate* from) {
    const Candidate c = *from;
    return {ordered(__uint_as_float(c.score)), c.position};
  }

  // Calls visit(candidate, whether it is one) for a warp's share of the CTA's candidates, neighbours, by rising
  // position. All lanes call it. Those below `least` are none.
  template <typename Visit>
  __device__ __forceinline__ void each_of_lists(Visit visit) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t share = (candidates + kWarps - 1) / kWarps, stop = min((warp + 1) * share, candidates);
    int32_t at = warp * share;
    int low = 0, high = lists;  // the list with it
    while (low + 1 < high) {
      const int middle = (low + high) / 2;
      (s.begin[middle] <= at ? low : high) = middle;
    }
    for (int i = low; at < stop; ++i) {
      const int32_t begin = s.begin[i], end = min(s.begin[i + 1], stop);
      const Candidate* from = list(i) - begin;
      for (; at < end; at += 32 * kAtOnce) {
        Candidate some[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          some[n] = at + 32 * n + lane < end ? load(from + at + 32 * n + lane) : Candidate{0, 0};
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          if (at + 32 * n < end) visit(some[n], some[n].score >= least);
      }
      at = end;
    }
  }

  template <typename Visit>
  __device__ __forceinline__ void each_candidate(Visit visit) const {
    if (kept) {
      for (int32_t i = threadIdx.x; i < candidates; i += kThreads) visit(s.candidates[i]);
    } else {
      each_of_lists([&](const Candidate& c, bool there) {
        if (there) visit(c);
      });
    }
  }

  // Finds this CTA's lists, and bounds of all CTAs' scores.
  __device__ void load_lists() {
    // A token's lists are neighbours, `per_cta` of each CTA of the filter.
    const int64_t group = token / p.group;
    const int per_cta = kLists / p.group;
    const int32_t first = p.lists.first_cta[group], all = (p.lists.last_cta[group] - first + 1) * per_cta;
    from_list = all * rank / ctas;
    const int to = all * (rank + 1) / ctas;
    lists = to - from_list;
    base = (group + first) * kLists + token % p.group * per_cta;
    if (threadIdx.x == 0) s.lowest = ~0u, s.highest = 0, s.floor = kMinusInfinity;
    __syncthreads();
    uint32_t lowest = ~0u, highest = 0, floor = kMinusInfinity;
    int32_t done = 0;
    for (int begin = 0; begin < all; begin += kThreads) {
      const int i = begin + threadIdx.x;
      const bool own = from_list <= i && i < to;
      const ListEnd end = i < all ? p.lists.ends[list_index(i)] : ListEnd{0, ~0u, 0, kMinusInfinity};
      if (end.count > 0) lowest = min(lowest, end.lowest), highest = max(highest, end.highest);
      floor = max(floor, end.floor);
      uint32_t sum;
      const uint32_t before = sum_before(own ? end.count : 0, sum);
      if (own) s.begin[i - from_list] = done + before;
      done += sum;
    }
    candidates = done;
    if (threadIdx.x == 0) s.begin[lists] = done;
    lowest = __reduce_min_sync(~0u, lowest), highest = __reduce_max_sync(~0u, highest);
    floor = __reduce_max_sync(~0u, floor);
    if (threadIdx.x % 32 == 0) atomicMin(&s.lowest, lowest), atomicMax(&s.highest, highest), atomicMax(&s.floor, floor);
    __syncthreads();
    least = max(s.lowest, s.floor + 1);
    gather();
  }

  // Those that may be chosen, in shared memory if there is room for them.
  __device__ void gather() {
    constexpr int kRounds = 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t gathered = 0;
    const int lists_rounded = 2 << (31 - __clz(max(lists, 1)));  // a power of two above
    for (int32_t begin = 0; begin < candidates; begin += kRounds * kThreads) {
      Candidate some[kRounds];
      uint32_t there[kRounds];
      // which list each of them is in
      int in[kRounds] = {};
      for (int step = lists_rounded / 2; step > 0; step /= 2) {
#pragma unroll
        for (int n = 0; n < kRounds; ++n) {
          const int further = in[n] + step;
          if (further < lists && s.begin[further] <= begin + n * kThreads + static_cast<int32_t>(threadIdx.x))
            in[n] = further;
        }
      }
#pragma unroll
      for (int n = 0; n < kRounds; ++n) {
        const int32_t index = begin + n * kThreads + static_cast<int32_t>(threadIdx.x);
        some[n] = {0, 0};
        if (index < candidates) some[n] = list(in[n])[index - s.begin[in[n]]];
      }
#pragma unroll
      for (int n = 0; n < kRounds; ++n)
        if (begin + n * kThreads + static_cast<int32_t>(threadIdx.x) < candidates)
          some[n].score = ordered(__uint_as_float(some[n].score));
#pragma unroll
      for (int n = 0; n < kRounds; ++n) {
        there[n] = __ballot_sync(~0u, some[n].score >= least);
        if (lane == 0) s.counts[n * kWarps + warp] = __popc(there[n]);
      }
      __syncthreads();
      // what comes before each warp's round: a lane has neighbouring counts
      constexpr int kOwn = kRounds * kWarps / 32;
      uint32_t counts[kOwn], own = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own += counts[i] = s.counts[lane * kOwn + i];
      uint32_t sum = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      const uint32_t all = __shfl_sync(~0u, sum, 31);
      __syncthreads();
      uint32_t before = gathered + sum - own;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (warp == 0) s.counts[lane * kOwn + i] = before;
        before += counts[i];
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kRounds; ++n) {
        const uint32_t place = s.counts[n * kWarps + warp] + __popc(there[n] & lanes_below());
        if (some[n].score >= least && place < static_cast<uint32_t>(p.kept)) s.candidates[place] = some[n];
      }
      gathered += all;
      __syncthreads();
    }
    kept = gathered <= static_cast<uint32_t>(p.kept);
    if (kept) candidates = gathered;
  }

  // bin_of says which bin a candidate is in, or kBins.
  template <typename BinOf>
  __device__ void find_bin(BinOf bin_of, uint32_t wanted, uint32_t& all) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
    __syncthreads();
    each_candidate([&](const Candidate& c) {
      const uint32_t bin = bin_of(c);
      if (bin < kBins) atomicAdd(&s.bins[bin], 1u);
    });
    const int per = kBins / ctas;
    const uint32_t* added = s.bins;
    if (ctas > 1) {
      sync_cluster();
      uint32_t own = 0, sum;
      const uint32_t bins = cast_smem_ptr_to_uint(s.bins + rank * per);
      for (int i = threadIdx.x; i < per; i += kThreads) {
        uint32_t total = 0;
#pragma unroll 4
        for (int cta = 0; cta < ctas; ++cta) total += load_from(bins + 4 * i, cta);
        s.added[i] = total;
        own += total;
      }
      sum_before(own, sum);
      if (threadIdx.x < ctas) store_to(cast_smem_ptr_to_uint(s.of_share + rank), threadIdx.x, sum);
    }
    sync_cluster();
    // the share with the bin
    uint32_t above = 0;
    int share = 0;
    all = 0;
    if (ctas > 1) {
      share = -1;
      uint32_t upto = 0;
      for (int cta = ctas - 1; cta >= 0; --cta) {
        const uint32_t count = s.of_share[cta];
        if (share < 0 && wanted <= upto + count) share = cta, above = upto;
        upto += count;
      }
      all = upto;
      if (share < 0) return;
    }
    // a thread has neighbouring bins, the first one the uppermost
    const int own = per > kThreads ? per / kThreads : 1;
    const int lowest = per - (static_cast<int>(threadIdx.x) + 1) * own;
    uint32_t count[kBins / kThreads] = {}, mine = 0, total;
#pragma unroll
    for (int i = 0; i < kBins / kThreads; ++i)
      if (i < own && lowest >= 0) {
        count[i] = ctas > 1 ? load_from(cast_smem_ptr_to_uint(s.added + lowest + i), share) : added[lowest + i];
        mine += count[i];
      }
    above += sum_before(mine, total);
    if (ctas == 1) all = total;
#pragma unroll
    for (int i = kBins / kThreads - 1; i >= 0; --i) {
      if (i >= own) continue;
      if (above < wanted && wanted <= above + count[i])
        s.bin = {static_cast<uint32_t>(share * per + lowest + i), above, count[i]};
      above += count[i];
    }
    __syncthreads();
  }

  // Few candidates share the bin with the last to be chosen: finds that one among them. They are brought together in
  // every CTA, and each thread ranks one.
  __device__ uint64_t find_in_bin(const Cut& cut, uint32_t wanted) {
    if (threadIdx.x == 0) s.own_members = 0;
    __syncthreads();
    each_candidate([&](const Candidate& c) {
      if (cut.line.bin_of(c.score) == cut.bin) s.members[atomicAdd(&s.own_members, 1u)] = rank_key(c);
    });
    sync_cluster();
    const uint64_t* members = s.members;
    uint32_t count = s.own_members;
    if (ctas > 1) {
      const int cta = threadIdx.x / 32;
      uint32_t other = 0, begin = 0;
      if (cta < ctas) {
        count = 0;
        for (int i = 0; i < ctas; ++i) {
          const uint32_t of_cta = load_from(cast_smem_ptr_to_uint(&s.own_members), i);
          if (i == cta) begin = count, other = of_cta;
          count += of_cta;
        }
        const uint32_t from = cast_smem_ptr_to_uint(s.members);
        for (uint32_t i = threadIdx.x % 32; i < other; i += 32)
          s.all_members[begin + i] = uint64_t{load_from(from + 8 * i + 4, cta)} << 32 | load_from(from + 8 * i, cta);
        if (threadIdx.x == 0) s.count = count;
      }
      __syncthreads();
      members = s.all_members;
      count = s.count;
    }
    if (threadIdx.x < count) {
      const uint64_t own = members[threadIdx.x];
      uint32_t better = 0;
      for (uint32_t i = 0; i < count; ++i) better += members[i] > own;
      if (better == wanted - 1) s.least = own;
    }
    __syncthreads();
    return s.least;
  }

  __device__ Cut find_cut() {
    Cut cut{Line(least, s.highest), 0, 0};
    if (s.lowest > s.highest) return cut;  // no candidates at all
    uint32_t all, above = 0, wanted = p.topk;
    find_bin([&](const Candidate& c) { return cut.line.bin_of(c.score); }, wanted, all);
    if (all <= wanted) return cut;
    cut.bin = s.bin.bin;
    above = s.bin.above;
    wanted -= above;
    if (s.bin.count == wanted) return cut;
    if (s.bin.count <= kMembers) {
      cut.least = find_in_bin(cut, wanted);
      return cut;
    }
    Range range(0, ~uint64_t{0});
#pragma unroll 1
    while (true) {
      sync_cluster();  // s.bin, s.added and s.of_share are written again
      find_bin(
          [&](const Candidate& c) {
            const uint64_t key = rank_key(c);
            return cut.line.bin_of(c.score) == cut.bin && range.holds(key) ? range.bin_of(key) : uint32_t{kBins};
          },
          wanted, all);
      range = range.of_bin(s.bin.bin);
      cut.least = range.low;
      wanted -= s.bin.above;
      if (s.bin.count == wanted) return cut;
    }
  }

  __device__ void write(int64_t index, const Candidate& c) const {
    int32_t* chosen = p.chosen + token * p.chosen_token;
    const int32_t position = p.position_at(token, static_cast<int32_t>(c.position));
    chosen[index] = p.slots.block_size > 0 ? slot_of_position(p.slots, p.request[token], position) : position;
    if (p.chosen_scores) p.chosen_scores[token * p.chosen_score_token + index] = score_of(c.score);
  }

  __device__ void fill(int64_t from) const {
    for (int64_t i = from + threadIdx.x; i < p.topk; i += kThreads) {
      p.chosen[token * p.chosen_token + i] = -1;
      if (p.chosen_scores) p.chosen_scores[token * p.chosen_score_token + i] = -INFINITY;
    }
  }

  __device__ void choose() {
    load_lists();
    const Cut cut = find_cut();
    // An odd number: the threads' candidates lie in different banks.
    const int32_t each = (candidates + kThreads - 1) / kThreads | 1;
    const int32_t begin = min(static_cast<int32_t>(threadIdx.x) * each, candidates),
                  end = min(begin + each, candidates);
    uint32_t own = 0, total;
    if (kept)
      for (int32_t i = begin; i < end; ++i) own += cut.keeps(s.candidates[i]);
    else
      each_candidate([&](const Candidate& c) { own += cut.keeps(c); });
    uint32_t place = sum_before(own, total);
    if (threadIdx.x < ctas) store_to(cast_smem_ptr_to_uint(s.chosen + rank), threadIdx.x, total);
    sync_cluster();
    uint32_t before = 0, all = 0;
    for (int cta = 0; cta < ctas; ++cta) {
      if (cta < rank) before += s.chosen[cta];
      all += s.chosen[cta];
    }
    if (rank == 0) fill(all);
    if (kept) {
      place += before;
      for (int32_t i = begin; i < end; ++i)
        if (cut.keeps(s.candidates[i])) write(place++, s.candidates[i]);
      return;
    }
    own = 0;
    each_of_lists([&](const Candidate& c, bool there) { own += there && cut.keeps(c); });
    own = warp_sum(own);
    place = before + __shfl_sync(~0u, sum_before(threadIdx.x % 32 == 31 ? own : 0, total), 0);
    each_of_lists([&](const Candidate& c, bool there) {
      const bool keep = there && cut.keeps(c);
      const uint32_t all_kept = __ballot_sync(~0u, keep);
      if (keep) write(place + __popc(all_kept & lanes_below()), c);
      place += __popc(all_kept);
    });
  }

  __device__ void run() {
    const int32_t length = p.length_of(token);
    if (length > p.topk) {
      if (p.scored(token) > 0)
        choose();
      else if (rank == 0)
        fill(0);
    } else if (rank == 0) {
      fill(length);
      for (int32_t i = threadIdx.x; i < length; i += kThreads) write(i, {kMinusInfinity, static_cast<uint32_t>(i)});
      if (p.chosen_scores && p.scored(token) > 0) {
        rank = 0, ctas = 1;  // others have nothing to do
        __syncthreads();
        load_lists();
        each_candidate([&](const Candidate& c) { write(c.position, c); });
      }
    }
  }
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) finish_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) uint8_t memory[];
  pdl_launch_dependents();
  pdl_wait();
  Finisher<kThreads> finisher{p, *reinterpret_cast<FinishShared<kThreads>*>(memory), blockIdx.y,
                              static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  finisher.run();
  if (gridDim.x > 1) {
    __syncthreads();  // the barrier of a cluster needs whole warps
    cute::cluster_arrive();
    cute::cluster_wait();
  }
#endif
}

}  // namespace mla::cuda::index::sm90
