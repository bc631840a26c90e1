// Adds contributions to the gradients of kv's rows, in a fixed order. Each thread has 8 dims of a row, and enough
// contributions in flight to hide their latency.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/order.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/ops.h"
#include "mla/number.h"

namespace mla::cuda {
namespace {

constexpr int kRows = 4;    // per CTA
constexpr int kAtOnce = 8;  // contributions in flight
constexpr int kDims = 8;    // per thread: 16 bytes of bf16

template <int kWidth>
constexpr int kThreads = kRows * kWidth / kDims;

template <int kWidth, int kGroups>
__global__ void __launch_bounds__(kThreads<kWidth>, 3) sum_kernel(const __grid_constant__ SumProblem p) {
  constexpr int kRowThreads = kWidth / kDims, kPairs = kAtOnce / kGroups;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kRowThreads;
  const int dim = threadIdx.x % kRowThreads * kDims;
  const bool exists = row < p.rows, first = p.first_pair == 0;
  pdl_launch_dependents();
  pdl_wait();
  const auto clamped = [&](int64_t at) { return min(max(at, int64_t{0}), p.total_pairs); };
  int64_t at = 0, end = 0;
  if (exists) at = clamped(first ? p.begin[row] : p.next[row]), end = clamped(p.begin[row + 1]);
  __syncthreads();  // all threads of a row have read what one of them writes
  if (!exists) return;

  int32_t pair[kPairs];  // the next pairs' indices within the block; -1 beyond it
  const auto load_pairs = [&](int64_t from) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int64_t number = from + i < end ? p.pairs[from + i] - p.first_pair : -1;
      pair[i] = static_cast<int32_t>(number >= 0 && number < p.pair_count ? number : -1);
    }
  };
  load_pairs(at);
  if (pair[0] < 0 && !first && !p.d_kv) return;

  float sum[kDims] = {};
  float* const accumulator = p.accumulator ? p.accumulator + row * kWidth + dim : nullptr;
  if (!first || p.continues) {
#pragma unroll
    for (int i = 0; i < kDims; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(accumulator + i);
      sum[i] = four.x, sum[i + 1] = four.y, sum[i + 2] = four.z, sum[i + 3] = four.w;
    }
  }
  while (pair[0] >= 0) {
    uint4 contribution[kPairs][kGroups];  // zeros where there is none
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        contribution[i][group] = {};
        if (pair[i] >= 0)
          contribution[i][group] = __ldcs(
              reinterpret_cast<const uint4*>(p.contributions + (group * p.group_stride + pair[i]) * kWidth + dim));
      }
      count += pair[i] >= 0;
    }
    at += count;
    load_pairs(at);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const uint4 piece = contribution[i][group];
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
          sum[2 * w] += bits_float(words[w] << 16), sum[2 * w + 1] += bits_float(words[w] & 0xffff0000u);
      }
  }
  if (p.next && dim == 0) p.next[row] = static_cast<int32_t>(at);
  if (accumulator) {
#pragma unroll
    for (int i = 0; i < kDims; i += 4)
      *reinterpret_cast<float4*>(accumulator + i) = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
  }
  if (p.d_kv)
    *reinterpret_cast<uint4*>(p.d_kv + row * p.d_kv_row + dim) = {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                                                  pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
}

using Kernel = void (*)(SumProblem);

static_assert(kMaxGroups == 4);
template <int kWidth>
constexpr Kernel kKernels[kMaxGroups] = {sum_kernel<kWidth, 1>, sum_kernel<kWidth, 2>, sum_kernel<kWidth, 3>,
                                         sum_kernel<kWidth, 4>};

}  // namespace

void backward_sum(const SumProblem& p, void* stream) {
  const auto ctas = static_cast<unsigned>((int64_t{p.rows} + kRows - 1) / kRows);
  const bool rope = p.width == kHeadDim;
  launch_pdl((rope ? kKernels<kHeadDim> : kKernels<kValueDim>)[p.groups - 1], dim3(ctas),
             rope ? kThreads<kHeadDim> : kThreads<kValueDim>, 0, stream, "backward_sum", p);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"backward_sum", reinterpret_cast<const void*>(kKernels<kHeadDim>[0]), kThreads<kHeadDim>, 0},
      {"backward_sum, two groups", reinterpret_cast<const void*>(kKernels<kHeadDim>[1]), kThreads<kHeadDim>, 0},
      {"backward_sum, rows of 512", reinterpret_cast<const void*>(kKernels<kValueDim>[0]), kThreads<kValueDim>, 0}};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
