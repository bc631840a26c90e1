// Writes a token's results: to the output, or to the workspace if the token is split.
#pragma once

#include <cstdint>

#include "cuda/common/pairs.cuh"
#include "mla/number.h"
#include "mla/problem.h"
#include "mla/softmax.h"

namespace mla::cuda::sm90 {

constexpr float kLowest = -1e30f;  // the maximum of nothing; finite, so that differences are no NaN
// row_max may lag behind the true maximum by a factor of 2^8. Accumulators are rescaled only beyond that.
constexpr float kSlack = 8.0f;

// a + b that is commutative to the bit: the compiler may not fuse a product into it.
__device__ __forceinline__ float add_in_any_order(float a, float b) { return __fadd_rn(a, b); }

struct HeadResult {
  float lse;
  float factor;  // of the output
  float max_logit;
};

// `row_max` and `max_score` are to base 2. A total of 0 is that of a token with nothing to attend to.
__device__ __forceinline__ HeadResult result_of_head(float total, float row_max, float max_score) {
  HeadResult result{-INFINITY, 0.0f, -INFINITY};
  if (total == 0.0f) return result;
  result.lse = lse_of(row_max * kLn2, total);
  result.factor = inverse_of(total);
  result.max_logit = max_logit_of(result.lse, max_score * kLn2);
  return result;
}

// Writes a head's lse and max logit. Returns the factor of its output.
__device__ __forceinline__ float finish_head(const AttentionProblem& p, int64_t token, int head, bool whole,
                                             int64_t partial, float total, float row_max, float max_score) {
  if (head >= p.heads) return 0.0f;
  auto [lse, factor, max_logit] = result_of_head(total, row_max, max_score);
  factor *= p.value_scale;
  if (whole) {
    factor = with_sink(factor, p, head, lse);
    p.lse[p.offset(p.lse_strides, token, head)] = lse;
    if (p.max_logits) p.max_logits[p.offset(p.max_strides, token, head)] = max_logit;
  } else {
    const Partials partials(p.workspace, p.ctas, p.heads);
    const int64_t row = partials.row(partial, head);
    partials.lse[row] = lse;
    partials.max_logits[row] = max_logit;
  }
  return factor;
}

// A warp writes a head's output from a row of 512 accumulators; zeros if `acc` is null.
template <Number kNumber>
__device__ __forceinline__ void write_row(const AttentionProblem& p, int64_t token, int head, bool whole,
                                          int64_t partial, const float* acc, float factor, int lane) {
  if (whole) {
    uint16_t* out = p.out + p.offset(p.out_strides, token, head);
#pragma unroll
    for (int i = 0; i < kValueDim / 256; ++i) {
      float4 a = {}, b = {};
      const int dim = 256 * i + 8 * lane;
      if (acc) a = *reinterpret_cast<const float4*>(acc + dim), b = *reinterpret_cast<const float4*>(acc + dim + 4);
      *reinterpret_cast<uint4*>(out + dim) = {
          pack<kNumber>(a.x * factor, a.y * factor), pack<kNumber>(a.z * factor, a.w * factor),
          pack<kNumber>(b.x * factor, b.y * factor), pack<kNumber>(b.z * factor, b.w * factor)};
    }
  } else {
    const Partials partials(p.workspace, p.ctas, p.heads);
    float* out = partials.out + partials.row(partial, head) * kValueDim;
#pragma unroll
    for (int i = 0; i < kValueDim / 128; ++i) {
      float4 a = {};
      const int dim = 128 * i + 4 * lane;
      if (acc) a = *reinterpret_cast<const float4*>(acc + dim);
      *reinterpret_cast<float4*>(out + dim) = {a.x * factor, a.y * factor, a.z * factor, a.w * factor};
    }
  }
}

}  // namespace mla::cuda::sm90
