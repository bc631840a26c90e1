// Combines partial results over disjoint sets of slots by their lse: a caller's (combine_partials), and those of tokens
// that the plan has split (combine_split_tokens). One warp per row of a head.
#include <algorithm>

#include "cuda/common/compact_row.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/order.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/ops.h"
#include "mla/number.h"
#include "mla/softmax.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kCombineCtasPerProcessor = 4;  // of combine_split_tokens

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(uint16_t x) { return bf16_to_float(x); }
__device__ __forceinline__ void narrow(float x, float* to) { *to = x; }
__device__ __forceinline__ void narrow(float x, uint16_t* to) { *to = float_to_bf16(x); }

// The weights of a row's splits.
struct Weights {
  float max_lse;
  float inverse;
  float lse;
  float lane_lse;  // of the split whose index is the lane; -inf if there is none

  __device__ __forceinline__ float of(float lse_of_split) const {
    return combine_weight(lse_of_split, max_lse) * inverse;
  }
};

__device__ __forceinline__ Weights weigh(const float* lse, int64_t stride, int splits, int lane) {
  const float mine = lane < splits ? lse[lane * stride] : -INFINITY;
  float max_lse = mine;
  for (int i = lane + 32; i < splits; i += 32) max_lse = fmaxf(max_lse, lse[i * stride]);
  max_lse = max_of_warp(max_lse);
  float total = combine_weight(mine, max_lse);
  for (int i = lane + 32; i < splits; i += 32) total += combine_weight(lse[i * stride], max_lse);
  total = sum_of_warp(total);
  return {max_lse, inverse_of(total), lse_of(max_lse, total), mine};
}

// Combines one lane's dims `lane`, `lane + 32`, ... of a row.
template <typename Value, typename Store>
__device__ __forceinline__ void combine_row(const Value* out, int64_t out_stride, const float* lse, int64_t lse_stride,
                                            int splits, int dim, const Weights& weights, int lane, Store store) {
  constexpr int kUnroll = 16;  // dims per lane at once
  for (int begin = lane; begin < dim; begin += 32 * kUnroll) {
    float sum[kUnroll] = {};
    for (int i = 0; i < splits; ++i) {
      const float weight = weights.of(lse[i * lse_stride]);
      if (weight == 0.0f) continue;  // an empty split may hold anything
      const Value* row = out + i * out_stride;
#pragma unroll
      for (int k = 0; k < kUnroll; ++k)
        if (begin + 32 * k < dim) sum[k] += weight * widen(row[begin + 32 * k]);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k)
      if (begin + 32 * k < dim) store(begin + 32 * k, sum[k]);
  }
}

template <typename Value>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineProblem<Value> p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (item >= p.tokens * p.heads) return;
  const int64_t token = item / p.heads, head = item % p.heads;
  const float* lse = p.lses + token * p.lses_token + head * p.lses_head;
  const Weights weights = weigh(lse, p.lses_partial, p.partials, lane);
  Value* out = p.out.at(token, head);
  combine_row(p.outs + token * p.outs_token + head * p.outs_head, p.outs_partial, lse, p.lses_partial, p.partials,
              p.dim, weights, lane, [&](int d, float x) { narrow(x, out + d); });
  if (lane == 0) *p.lse.at(token, head) = weights.lse;
}

// Stores four neighbouring dims of a row, rounded to bf16 or f16.
__device__ __forceinline__ void store_four(uint16_t* to, const float4& x, bool f16) {
  const auto round = [f16](float x) { return f16 ? float_to_f16(x) : float_to_bf16(x); };
  const ushort4 rounded{round(x.x), round(x.y), round(x.z), round(x.w)};
  if (reinterpret_cast<uintptr_t>(to) % sizeof(rounded) == 0) {
    *reinterpret_cast<ushort4*>(to) = rounded;
  } else {  // a caller's rows may begin anywhere
    to[0] = rounded.x, to[1] = rounded.y, to[2] = rounded.z, to[3] = rounded.w;
  }
}

// Finds the plan entry that begins a split token and has `before` such entries in front of it; null if there is none. A
// warp calls it; a lane reads four entries at once.
__device__ __forceinline__ const PlanEntry* find_split_token(const AttentionProblem& p, int before, int lane) {
  constexpr int kEntries = 4;
  for (int begin = 0; begin < p.ctas; begin += 32 * kEntries) {
    bool splits[kEntries];
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      const int cta = begin + 32 * k + lane;
      splits[k] = cta < p.ctas && p.plan[cta].splits > 1;
    }
#pragma unroll
    for (int k = 0; k < kEntries; ++k) {
      uint32_t found = __ballot_sync(~0u, splits[k]);
      if (before < __popc(found)) {
        for (; before > 0; --before) found &= found - 1;
        return p.plan + begin + 32 * k + __ffs(found) - 1;
      }
      before -= __popc(found);
    }
  }
  return nullptr;
}

// A lane's share of a split's row: four times four neighbouring dims.
struct FloatSplit {
  static constexpr int kAtOnce = 2;  // splits whose loads are in flight together; four would spill

  float4 fours[4];

  static __device__ __forceinline__ int dim(int four, int lane) { return 128 * four + 4 * lane; }

  __device__ __forceinline__ void load(const Partials& partials, int64_t row, int lane) {
    const float* values = partials.out + row * kValueDim;
#pragma unroll
    for (int i = 0; i < 4; ++i) fours[i] = *reinterpret_cast<const float4*>(values + dim(i, lane));
  }

  __device__ __forceinline__ void add_to(float4 (&sum)[4], float weight) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[i].x += weight * fours[i].x, sum[i].y += weight * fours[i].y;
      sum[i].z += weight * fours[i].z, sum[i].w += weight * fours[i].w;
    }
  }

  static __device__ __forceinline__ void in_order(float4 (&)[4], int) {}
};

// The same of a CompactRow. Accumulators have its order until in_order().
struct CompactSplit {
  static constexpr int kAtOnce = 4;

  uint4 pieces[2];
  float factor[2];

  static __device__ __forceinline__ int dim(int four, int lane) { return 256 * (four / 2) + 8 * lane + four % 2 * 4; }

  __device__ __forceinline__ void load(const Partials& partials, int64_t row, int lane) {
    const CompactRow& compact = compact_row(partials, row);
#pragma unroll
    for (int i = 0; i < 2; ++i) pieces[i] = compact.pieces[32 * i + lane], factor[i] = compact.factor[i];
  }

  __device__ __forceinline__ void add_to(float4 (&sum)[4], float weight) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4& piece = pieces[i / 2];
      const float2 first = unpack_f16(i % 2 ? piece.z : piece.x), second = unpack_f16(i % 2 ? piece.w : piece.y);
      const float by = weight * factor[i / 2];
      sum[i].x += by * first.x, sum[i].y += by * first.y, sum[i].z += by * second.x, sum[i].w += by * second.y;
    }
  }

  // Transposes among four lanes: each has a pair of each of four eights, and gets one eight.
  static __device__ __forceinline__ void in_order(float4 (&sum)[4], int lane) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float2 pair[4] = {
          {sum[i].x, sum[i].y}, {sum[i].z, sum[i].w}, {sum[i + 1].x, sum[i + 1].y}, {sum[i + 1].z, sum[i + 1].w}};
#pragma unroll
      for (int by = 1; by < 4; by *= 2)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k & by) continue;
          const bool upper = lane & by;
          const float2 mine = upper ? pair[k] : pair[k + by];
          const float2 other{__shfl_xor_sync(~0u, mine.x, by), __shfl_xor_sync(~0u, mine.y, by)};
          if (upper)
            pair[k] = other;
          else
            pair[k + by] = other;
        }
      sum[i] = {pair[0].x, pair[0].y, pair[1].x, pair[1].y};
      sum[i + 1] = {pair[2].x, pair[2].y, pair[3].x, pair[3].y};
    }
  }
};

// blockIdx.x: the x-th split token. A warp combines one head after the other. Rows are few, so the latency of a row
// counts: the loads of several splits are issued at once.
//
// The kernel is launched before the attention kernel has ended (PDL), so that its start costs nothing. It waits for the
// partial results itself.
template <typename Split>
__global__ void __launch_bounds__(kThreads, kCombineCtasPerProcessor)
    combine_split_tokens_kernel(const __grid_constant__ AttentionProblem p) {
  constexpr int kAtOnce = Split::kAtOnce;
  pdl_launch_dependents();
  const int lane = threadIdx.x % 32;
  const PlanEntry* const found = find_split_token(p, blockIdx.x, lane);
  const PlanEntry entry = found ? *found : PlanEntry{};
  pdl_wait();  // every CTA: this kernel must not end before attention does
  if (!found || entry.token_end < 1 || entry.token_end > p.tokens) return;
  const Partials partials(p.workspace, p.ctas, p.heads);
  const int64_t partial = begun_partial(entry);
  const int splits = static_cast<int>(min(static_cast<int64_t>(entry.splits), partials.count - partial));
  if (partial < 0 || splits < 1) return;
  const int64_t token = entry.token_end - 1;
  for (int head = blockIdx.y * kWarps + threadIdx.x / 32; head < p.heads; head += gridDim.y * kWarps) {
    const int64_t first = partials.row(partial, head);
    const float* lse = partials.lse + first;

    float4 sum[4] = {};
    Weights weights;
    float lane_weight;  // of the current 32 splits, the lane's
    for (int begin = 0; begin < splits; begin += kAtOnce) {
      Split split[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // past the last split, load that one again: under a condition the loads would wait for one another
        split[i].load(partials, first + min(begin + i, splits - 1) * int64_t{p.heads}, lane);
      }
      if (begin == 0) {
        weights = weigh(lse, p.heads, splits, lane);
        lane_weight = weights.of(weights.lane_lse);
      } else if (begin % 32 == 0) {
        lane_weight = begin + lane < splits ? weights.of(lse[static_cast<int64_t>(begin + lane) * p.heads]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __shfl_sync(~0u, lane_weight, (begin + i) % 32);
        if (begin + i < splits && weight != 0.0f) split[i].add_to(sum, weight);  // an empty split may hold anything
      }
    }
    Split::in_order(sum, lane);
    const float scale = with_sink(1.0f, p, head, weights.lse);
    uint16_t* out = p.out + p.offset(p.out_strides, token, head);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_four(out + Split::dim(i, lane), {sum[i].x * scale, sum[i].y * scale, sum[i].z * scale, sum[i].w * scale},
                 p.tile == TileType::f16_576);
    if (lane == 0) p.lse[p.offset(p.lse_strides, token, head)] = weights.lse;
    if (!p.max_logits) continue;
    float max_logit = -INFINITY;
    for (int i = lane; i < splits; i += 32)
      max_logit = fmaxf(max_logit, partials.max_logits[first + static_cast<int64_t>(i) * p.heads]);
    max_logit = max_of_warp(max_logit);
    if (lane == 0) p.max_logits[p.offset(p.max_strides, token, head)] = max_logit_of(weights.lse, max_logit);
  }
}

}  // namespace

template <typename Value>
static void combine(const CombineProblem<Value>& p, void* stream) {
  launch(combine_kernel<Value>, (p.tokens * p.heads + kWarps - 1) / kWarps, kThreads, 0, stream, "combine_partials", p);
}

void combine_partials(const CombineProblem<float>& p, void* stream) { combine(p, stream); }
void combine_partials(const CombineProblem<uint16_t>& p, void* stream) { combine(p, stream); }

void combine_split_tokens(const AttentionProblem& p, bool compact, void* stream) {
  // At most one wave of CTAs: tokens are rarely split, but this kernel always runs. A head is one warp's work whatever
  // the grid is, so the bits don't depend on it.
  const int most_ctas = kCombineCtasPerProcessor * describe_current_gpu().multiprocessors;
  const int most_tokens = std::min(p.tokens, p.ctas);  // that may be split
  const int heads = std::clamp(most_ctas / most_tokens, 1, (p.heads + kWarps - 1) / kWarps);
  launch_pdl(compact ? combine_split_tokens_kernel<CompactSplit> : combine_split_tokens_kernel<FloatSplit>,
             dim3(most_tokens, heads), kThreads, 0, stream, "combine split tokens", p);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"combine_partials fp32", reinterpret_cast<const void*>(combine_kernel<float>), kThreads, 0},
      {"combine_partials bf16", reinterpret_cast<const void*>(combine_kernel<uint16_t>), kThreads, 0},
      {"combine split tokens", reinterpret_cast<const void*>(combine_split_tokens_kernel<FloatSplit>), kThreads, 0},
      {"combine split tokens, compact", reinterpret_cast<const void*>(combine_split_tokens_kernel<CompactSplit>),
       kThreads, 0},
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
