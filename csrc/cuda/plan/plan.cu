// The plan on the GPU: one CTA, whatever the number of tokens. See mla/plan.h for what it computes;
// csrc/cpu/plan/plan.cpp walks the same steps one after the other. All of its time is latency, so it has few barriers
// and no more threads than there is work for.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/order.cuh"
#include "cuda/common/scan.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"
#include "mla/plan.h"

namespace mla::cuda {
namespace {

constexpr int kMaxThreads = 32 * kMaxWarps;
constexpr int kMaxSpans = 4096;
static_assert(kMostEvenTokens <= kMaxSpans, "such tokens are a span each");

struct PlanJob {
  PlanShape shape;
  PlanEntry* entries;
  int32_t ctas;
  int32_t span;        // tokens of a span, the unit of the prefix sum; one, if there are few tokens
  int32_t spans;       // how many there are
  int32_t own_spans;   // spans that a thread adds up
  int64_t full_units;  // units of all tokens, if all lists are full
  int32_t whole_ctas;  // CTAs that take whole tokens then; 0: tokens are split
  bool aligned;        // whether entries are, to 16 bytes
  bool fit_clusters;   // whether splits may be equal after all: see cluster_splits()
};

// Units: wide enough for the units of all tokens together. uint32_t spares the GPU long sums and divisions.
template <typename Units>
struct Planner {
  const PlanJob& p;
  const PlanShape& shape;
  Units* units_before;  // units before each span, and at the end those of all
  PlanShape settled;    // the shape, and whether tokens stay whole after all
  Units units;          // of all tokens
  Units active;         // CTAs that get work
  Units splits;         // of each token, or 0: see fixed_splits()

  __device__ Planner(const PlanJob& job, Units* memory) : p(job), shape(job.shape), units_before(memory) {}

  // Fills units_before: first from the thread's own first span, then from the beginning. A barrier has to follow.
  __device__ __forceinline__ void add_up(Units (&warp_units)[kMaxWarps]) {
    const int thread = threadIdx.x;
    const int32_t first_span = thread * p.own_spans;
    const int32_t last_span = min(first_span + p.own_spans, p.spans);
    Units own_units = 0;
#pragma unroll 1
    for (int32_t span = first_span; span < last_span; ++span) {
      units_before[span] = own_units;
      const int32_t first = span * p.span, last = first + min(p.span, shape.tokens - first);
#pragma unroll 1
      for (int32_t token = first; token < last; ++token) own_units += shape.token_units + token_tiles(shape, token);
    }
    const Units before_thread = exclusive_sum(own_units, units, warp_units);
#pragma unroll 1
    for (int32_t span = first_span; span < last_span; ++span) units_before[span] += before_thread;
    if (thread == 0) units_before[p.spans] = units;
  }

  __device__ __forceinline__ void share_out() {
    const bool whole = p.whole_ctas > 0 && units == static_cast<Units>(p.full_units);
    settled = shape;
    settled.whole_tokens |= whole;
    // Divisors of one, as plan_shape() has for GPUs, cost nothing once the compiler knows.
    PlanShape ones = shape;
    ones.min_split = ones.good_split = ones.ctas_per_processor = 1;
    const bool has_ones = shape.min_split == 1 && shape.good_split == 1 && shape.ctas_per_processor == 1;
    splits = whole ? 0 : fixed_splits(shape, units, p.ctas);
    active = whole      ? p.whole_ctas
             : splits   ? splits * shape.tokens
             : has_ones ? active_ctas(ones, units, p.ctas)
                        : active_ctas(shape, units, p.ctas);
  }

  // Splits tokens for clusters after all, if none is long. Spans are tokens here, as these are few.
  __device__ __forceinline__ void fit_clusters() {
    if (splits > 0 || settled.whole_tokens) return;
    Units longest = 0;
#pragma unroll 1
    for (int32_t token = 0; token < shape.tokens; ++token) longest = max(longest, tiles(token));
    splits = cluster_splits(shape, longest, units, p.ctas);
    if (splits > 0) active = splits * shape.tokens;
  }

  __device__ __forceinline__ Units tiles(int32_t token) const {
    return p.span == 1 ? units_before[token + 1] - units_before[token] - shape.token_units : token_tiles(shape, token);
  }

  // Where a CTA begins: in some span, and there in some token.
  __device__ __forceinline__ PlanBorder border(int64_t cta) const {
    if (cta == 0) return {0, 0};
    if (cta >= active || shape.tokens == 0) return {shape.tokens, 0};
    const Units index = cta;
    Units start;
    if (splits > 0) {
      const int32_t token = static_cast<int32_t>(index / splits);
      start =
          units_before[token] + start_of_split(index % splits, splits, units_before[token + 1] - units_before[token]);
    } else {
      start = start_of_cta(index, active, units);
    }
    uint32_t low = 0, high = p.spans - 1;  // the last span that begins at or before that
#pragma unroll 1
    while (low < high) {
      const uint32_t middle = (low + high + 1) / 2;
      if (units_before[middle] <= start)
        low = middle;
      else
        high = middle - 1;
    }
    Units offset = start - units_before[low];
#pragma unroll 1
    for (int32_t token = low * p.span;; ++token) {
      const Units here = tiles(token);
      if (offset < here + shape.token_units) return settle_border(settled, token, here, offset);
      offset -= here + shape.token_units;
    }
  }

  __device__ __forceinline__ void store(int64_t cta, PlanBorder begin, PlanBorder end, int32_t split,
                                        uint32_t partial) const {
    alignas(16) PlanEntry entry{begin.token, end.token + (end.tile > 0),    begin.tile,      end.tile, split,
                                1,           static_cast<int32_t>(partial), shape.tile_slots};
    if (end.tile == 0 && end.token > begin.token) entry.tile_end = tiles(end.token - 1);
    if (p.aligned)
      store_bytes<sizeof(entry), true>(&entry, p.entries + cta);
    else
      p.entries[cta] = entry;
  }
};

template <typename Units>
__global__ void __launch_bounds__(kMaxThreads, 1) plan_kernel(const __grid_constant__ PlanJob p) {
  extern __shared__ uint64_t dynamic_shared[];
  __shared__ Units warp_units[kMaxWarps];
  __shared__ uint32_t warp_partials[kMaxWarps];
  __shared__ int32_t warp_starts[kMaxWarps];
  __shared__ PlanBorder borders[kMaxThreads + 1];
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread % 32, warp = thread / 32;

  pdl_launch_dependents();
  pdl_wait();
  Planner<Units> planner(p, reinterpret_cast<Units*>(dynamic_shared));
  planner.add_up(warp_units);
  if (thread == 0) borders[0] = {0, 0};
  planner.share_out();
  __syncthreads();
  if (p.fit_clusters) planner.fit_clusters();

  // Entries in rounds. The last thread only finds where the CTA before it ends, and takes that CTA's successor in
  // the next round; partials and splits go on from one round to the next.
  uint32_t partials_before_round = 0;
  int32_t open_start = 0;  // the CTA that continues the open token first
  for (int64_t round = 0; round < p.ctas; round += threads - 1) {
    const int64_t cta = round + thread;
    const bool real = cta < p.ctas && thread < threads - 1;
    const PlanBorder begin = planner.border(cta), no_border{0, 0};
    borders[thread + 1] = begin;  // borders[0] is left from the round before
    __syncthreads();
    const PlanBorder before = borders[thread], end = real ? borders[thread + 2] : no_border;
    const bool continues = real && begin.tile > 0;
    const bool passes_on = continues && end.tile > 0 && begin.token == end.token;
    const bool opens = real && end.tile > 0 && !passes_on;
    const bool starts = continues && !(before.tile > 0 && before.token == begin.token);

    // Its partial slot is the number of tokens that earlier CTAs continue or open. Its split is its distance to the
    // latest CTA that was the first to continue a token.
    const uint32_t continuing = __ballot_sync(~0u, continues), opening = __ballot_sync(~0u, opens);
    const uint32_t starting = __ballot_sync(~0u, starts);
    const int32_t warp_cta = static_cast<int32_t>(round) + 32 * warp;
    const auto latest = [&](uint32_t lanes) { return lanes ? warp_cta + 31 - __clz(lanes) : 0; };
    if (lane == 31) warp_starts[warp] = latest(starting);
    uint32_t partials;
    uint32_t partial = sum_before_warp<uint32_t>(__popc(continuing) + __popc(opening), partials, warp_partials);
    partial += partials_before_round + __popc(continuing & lanes_below()) + __popc(opening & lanes_below());
    const int32_t other_start = lane < threads / 32 ? warp_starts[lane] : 0;
    const int32_t start_before_warp = max(open_start, __reduce_max_sync(~0u, lane < warp ? other_start : 0));
    const int32_t start = max(start_before_warp, latest(starting & (lanes_below() | 1u << lane)));
    partials_before_round += partials;
    open_start = max(open_start, __reduce_max_sync(~0u, other_start));

    const int32_t split = continues ? static_cast<int32_t>(cta) - start + 1 : 0;
    if (real) planner.store(cta, begin, end, split, partial);
    if (thread == threads - 1) borders[0] = before;
    __syncthreads();
    // The last split of a token tells the first one, which may be in an earlier round, how many there are.
    if (continues && !passes_on) p.entries[cta - split].splits = split + 1;
  }
}

using Kernel = void (*)(PlanJob);
constexpr Kernel kKernel = plan_kernel<uint32_t>, kWideKernel = plan_kernel<uint64_t>;

int32_t divided_up(int64_t n, int64_t by) { return static_cast<int32_t>((n + by - 1) / by); }

}  // namespace

void make_plan(const PlanProblem& p, void* stream) {
  const PlanShape shape = plan_shape(PlanFor::gpu, p);
  const int32_t ctas = p.launch.ctas;
  // a thread for each token and for each border, while there are threads
  const int64_t wanted = std::max<int64_t>(shape.tokens, int64_t{ctas} + 1);
  const int threads = static_cast<int>(std::min<int64_t>((wanted + 31) / 32 * 32, kMaxThreads));
  const int32_t span = std::max(divided_up(shape.tokens, kMaxSpans), 1);
  const int32_t spans = divided_up(shape.tokens, span);
  const int64_t most_units = full_units(shape);
  const bool wide = most_units > UINT32_MAX;
  const int shared_bytes = (spans + 1) * static_cast<int>(wide ? sizeof(uint64_t) : sizeof(uint32_t));
  launch_pdl(wide ? kWideKernel : kKernel, 1, threads, shared_bytes, stream, "plan",
             PlanJob{shape, p.entries, ctas, span, spans, divided_up(spans, threads), most_units,
                     static_cast<int32_t>(whole_token_ctas(shape, ctas)), aligned16(p.entries, sizeof(PlanEntry)),
                     may_fit_clusters(shape, ctas)});
}

MLA_KERNELS {
  constexpr int kSharedBytes = (kMaxSpans + 1) * sizeof(uint32_t);
  static const KernelEntry entries[] = {{"plan", reinterpret_cast<const void*>(kKernel), kMaxThreads, kSharedBytes}};
  return {entries, 1};
}

}  // namespace mla::cuda
