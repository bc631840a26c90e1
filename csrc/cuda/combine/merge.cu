// Merging results over disjoint sets of slots by their lse: parts that a caller brings (merge_partials), and those
// that a plan's cuts have left (merge_cut_tokens). A warp a row of one head.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/order.cuh"
#include "cuda/ops.h"
#include "mla/number.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMergeBlocks = 16;  // that share the heads of a cut token

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(uint16_t x) { return bf16_to_float(x); }
__device__ __forceinline__ void narrow(float x, float* to) { *to = x; }
__device__ __forceinline__ void narrow(float x, uint16_t* to) { *to = float_to_bf16(x); }

__device__ __forceinline__ float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// How the parts of one row weigh: e^(lse_i - lse) = e^(lse_i - reference) * inverse.
struct Weights {
  float reference;
  float inverse;
  float lse;
};

__device__ __forceinline__ Weights weigh(const float* lse, int64_t stride, int parts, int lane) {
  float largest = -INFINITY;
  for (int i = lane; i < parts; i += 32) largest = fmaxf(largest, lse[i * stride]);
  largest = warp_max(largest);
  const float reference = largest == -INFINITY ? 0.0f : largest;  // -inf minus -inf would be NaN
  float total = 0.0f;
  for (int i = lane; i < parts; i += 32) total += expf(lse[i * stride] - reference);
  total = warp_sum(total);
  return {reference, total == 0.0f ? 0.0f : 1.0f / total, reference + logf(total)};
}

// One lane's dims, `lane`, `lane + 32`, ... of the merged row.
template <typename Value, typename Store>
__device__ __forceinline__ void merge_row(const Value* out, int64_t out_stride, const float* lse, int64_t lse_stride,
                                          int parts, int dim, const Weights& weights, int lane, Store store) {
  constexpr int kUnroll = 16;  // dims that a lane sums at once
  for (int begin = lane; begin < dim; begin += 32 * kUnroll) {
    float sum[kUnroll] = {};
    for (int i = 0; i < parts; ++i) {
      const float weight = expf(lse[i * lse_stride] - weights.reference) * weights.inverse;
      if (weight == 0.0f) continue;  // an empty part may hold anything
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
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeProblem<Value> p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (item >= p.tokens * p.heads) return;
  const int64_t token = item / p.heads, head = item % p.heads;
  const float* lse = p.part_lse + token * p.part_lse_token + head * p.part_lse_head;
  const Weights weights = weigh(lse, p.part_lse_part, p.parts, lane);
  Value* out = p.out + token * p.out_token + head * p.out_head;
  merge_row(p.part_out + token * p.part_out_token + head * p.part_out_head, p.part_out_part, lse, p.part_lse_part,
            p.parts, p.dim, weights, lane, [&](int d, float x) { narrow(x, out + d); });
  if (lane == 0) p.lse[token * p.lse_token + head * p.lse_head] = weights.lse;
}

// Block x: a worker, whose last token may be cut; blocks y share the heads. A thread has four dims.
//
// The kernel is launched before the one it merges for has ended, so that its start costs nothing; it waits for that
// one's results itself.
__global__ void __launch_bounds__(kThreads) merge_cut_tokens_kernel(const __grid_constant__ AttentionProblem p) {
  static_assert(4 * kThreads == kValueDim);
  constexpr int kAtOnce = 16;  // parts whose loads are under way together
  let_next_kernel_begin();
  const PlanRow row = p.plan[blockIdx.x];
  wait_for_kernel_before();  // by every block: the kernel's end must not come before that one's
  if (row.parts < 2 || row.token_end < 1 || row.token_end > p.tokens) return;
  const Partials partials(p.workspace, p.workers, p.heads);
  const int64_t place = begun_place(row);
  const int parts = static_cast<int>(min(static_cast<int64_t>(row.parts), partials.places - place));
  if (place < 0 || parts < 1) return;
  const int64_t token = row.token_end - 1;
  const int lane = threadIdx.x % 32;

  for (int head = blockIdx.y; head < p.heads; head += gridDim.y) {
    const int64_t first = partials.row(place, head);
    const float* lse = partials.lse + first;
    const float* values = partials.out + first * kValueDim + 4 * threadIdx.x;
    float4 sum = {};
    Weights weights;
    for (int begin = 0; begin < parts; begin += kAtOnce) {
      float4 part[kAtOnce];
      float weight_of_part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        // beyond the last part that one again: with a condition the loads would wait for one another
        part[i] = *reinterpret_cast<const float4*>(values + min(begin + i, parts - 1) * int64_t{p.heads} * kValueDim);
      if (begin == 0) weights = weigh(lse, p.heads, parts, lane);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        weight_of_part[i] = 0.0f;
        if (begin + i < parts)
          weight_of_part[i] =
              expf(lse[static_cast<int64_t>(begin + i) * p.heads] - weights.reference) * weights.inverse;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = weight_of_part[i];
        if (weight == 0.0f) continue;  // an empty part may hold anything
        sum.x += weight * part[i].x, sum.y += weight * part[i].y;
        sum.z += weight * part[i].z, sum.w += weight * part[i].w;
      }
    }
    const float scale = p.sink && weights.lse > -INFINITY ? 1.0f / (1.0f + expf(p.sink[head] - weights.lse)) : 1.0f;
    uint16_t* out = p.out + token * p.out_token + head * p.out_head + 4 * threadIdx.x;
    const float scaled[4] = {sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = float_to_bf16(scaled[i]);
    if (threadIdx.x >= 32) continue;
    if (lane == 0) p.lse[token * p.lse_token + head * p.lse_head] = weights.lse;
    if (!p.max_logits) continue;
    float largest = -INFINITY;
    for (int i = lane; i < parts; i += 32)
      largest = fmaxf(largest, partials.max_logits[first + static_cast<int64_t>(i) * p.heads]);
    largest = warp_max(largest);
    if (lane == 0) p.max_logits[token * p.max_token + head * p.max_head] = isnan(weights.lse) ? weights.lse : largest;
  }
}

}  // namespace

template <typename Value>
void merge_partials(const MergeProblem<Value>& p, void* stream) {
  launch(merge_kernel<Value>, (p.tokens * p.heads + kWarps - 1) / kWarps, kThreads, 0, stream, "merge_partials", p);
}

template void merge_partials(const MergeProblem<float>&, void*);
template void merge_partials(const MergeProblem<uint16_t>&, void*);

void merge_cut_tokens(const AttentionProblem& p, void* stream) {
  launch_early(merge_cut_tokens_kernel, dim3(p.workers, std::min(p.heads, kMergeBlocks)), kThreads, 0, stream,
               "merge of cut tokens", p);
}

KernelList merge_kernels() {
  static const KernelEntry entries[] = {
      {"merge_partials fp32", reinterpret_cast<const void*>(merge_kernel<float>), kThreads, 0},
      {"merge_partials bf16", reinterpret_cast<const void*>(merge_kernel<uint16_t>), kThreads, 0},
      {"merge of cut tokens", reinterpret_cast<const void*>(merge_cut_tokens_kernel), kThreads, 0},
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
