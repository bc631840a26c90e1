// Writes tokens into the paged cache: a warp a token. Everything that a warp reads is on its way before it waits for
// any of it, slot or not, and what is computed takes less time than the memory: then the cache is written about as fast
// as it could be copied.
#include "cuda/common/e4m3.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTokensPerBlock = kThreads / 32;
constexpr int kRopeLanes = 8;  // lanes that each carry 8 rope values
constexpr int kRopeValues = kRope / kRopeLanes;

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(uint16_t x) { return bf16_to_float(x); }
__device__ __forceinline__ uint16_t as_bf16(float x) { return float_to_bf16(x); }
__device__ __forceinline__ uint16_t as_bf16(uint16_t x) { return x; }

// x / divisor, rounded to nearest, given the divisor's reciprocal. A GPU divides by these steps anyway, but here the
// reciprocal serves many numbers. The remainder's sign is such that a quotient of -0 stays one.
__device__ __forceinline__ float quotient(float x, float divisor, float reciprocal) {
  float q = __fmul_rn(x, reciprocal);
#pragma unroll
  for (int i = 0; i < 2; ++i) q = __fmaf_rn(-reciprocal, __fmaf_rn(q, divisor, -x), q);
  return q;
}

// Whether that is right for a group with this scale. Above the lower bound no remainder underflows that e4m3 could
// show; below the upper one no value is infinite, as an infinity makes for a larger scale.
__device__ __forceinline__ bool is_ordinary(float scale) { return scale >= 0x1p-64f && scale <= 0x1p100f; }

// Blocks that a multiprocessor should hold, so that enough is on its way.
template <typename Number, bool kAligned>
constexpr int kMinBlocks = kAligned ? (sizeof(Number) == 2 ? 12 : 10) : 1;

// Number: how kv_c and k_pe come (uint16_t is bf16). kQuantised: e4m3 with fp32 scales, else bf16.
template <typename Number, bool kQuantised, bool kAligned>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Number, kAligned>)
    write_kernel(const __grid_constant__ CacheWriteProblem p) {
  // A lane has 16 latent values in a row, so that 8 lanes share a scale, or twice 8, so that lanes write side by side.
  constexpr int kPieces = kQuantised ? 1 : 2;
  constexpr int kValues = kLatent / 32 / kPieces;
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokensPerBlock + threadIdx.x / 32;
  int64_t slot = -1;
  alignas(16) Number latent[kPieces][kValues];
  alignas(16) Number rope[kRopeValues];
  if (token < p.tokens) {  // a branch of its own, as the compiler would else load latent only once it knows the slot
    slot = p.slots[token];
    const Number* from = static_cast<const Number*>(p.latent) + token * p.latent_token;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      load_bytes<sizeof(latent[i]), kAligned>(from + (32 * i + lane) * kValues, latent[i]);
    from = static_cast<const Number*>(p.rope) + token * p.rope_token;
    if (lane < kRopeLanes) load_bytes<sizeof(rope), kAligned>(from + lane * kRopeValues, rope);
  }
  if (!p.cache.holds(slot)) return;
  uint8_t* row = p.cache.row(slot);

  if constexpr (kQuantised) {
    const Number(&values)[kValues] = latent[0];
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) amax = fmaxf(amax, fabsf(as_float(values[i])));  // leaves NaN out
    constexpr int kGroupLanes = kFp8DsMla.group / kValues;
#pragma unroll
    for (int distance = 1; distance < kGroupLanes; distance *= 2)
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
    const float scale = group_scale(amax, p.power_of_two);
    alignas(16) uint16_t fp8[kValues / 2];
    if (is_ordinary(scale)) {
      const float reciprocal = __frcp_rn(scale);
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i)
        fp8[i] = to_e4m3x2(quotient(as_float(values[2 * i]), scale, reciprocal),
                           quotient(as_float(values[2 * i + 1]), scale, reciprocal));
    } else {
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i)
        fp8[i] = to_e4m3x2(__fdiv_rn(as_float(values[2 * i]), scale), __fdiv_rn(as_float(values[2 * i + 1]), scale));
    }
    store_bytes<sizeof(fp8), kAligned>(fp8, row + lane * kValues);
    if (lane % kGroupLanes == 0)
      store_bytes<4, kAligned>(&scale, row + kFp8DsMla.scale_offset() + 4 * (lane / kGroupLanes));
  } else {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      alignas(16) uint16_t values[kValues];
#pragma unroll
      for (int k = 0; k < kValues; ++k) values[k] = as_bf16(latent[i][k]);
      store_bytes<sizeof(values), kAligned>(values, row + (32 * i + lane) * sizeof(values));
    }
  }

  if (lane < kRopeLanes) {
    constexpr int kRopeOffset = kQuantised ? kFp8DsMla.rope_offset() : kBf16.rope_offset();
    alignas(16) uint16_t values[kRopeValues];
#pragma unroll
    for (int i = 0; i < kRopeValues; ++i) values[i] = as_bf16(rope[i]);
    store_bytes<sizeof(values), kAligned>(values, row + kRopeOffset + lane * sizeof(values));
  }
}
using Kernel = void (*)(CacheWriteProblem);

template <typename Number>
Kernel choose(bool quantised, bool aligned) {
  if (quantised) return aligned ? write_kernel<Number, true, true> : write_kernel<Number, true, false>;
  return aligned ? write_kernel<Number, false, true> : write_kernel<Number, false, false>;
}

}  // namespace

void cache_write(const CacheWriteProblem& p, void* stream) {
  const int64_t number = p.source == Source::fp32 ? 4 : 2;
  const bool aligned = aligned16(p.latent, p.latent_token * number) && aligned16(p.rope, p.rope_token * number) &&
                       rows_aligned16(p.cache);
  const bool quantised = p.cache.format.code == Code::e4m3;
  const Kernel kernel =
      p.source == Source::fp32 ? choose<float>(quantised, aligned) : choose<uint16_t>(quantised, aligned);
  launch(kernel, (p.tokens + kTokensPerBlock - 1) / kTokensPerBlock, kThreads, 0, stream, "cache_write", p);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"cache_write fp8_ds_mla from bf16", reinterpret_cast<const void*>(choose<uint16_t>(true, true)), kThreads, 0},
      {"cache_write fp8_ds_mla from fp32", reinterpret_cast<const void*>(choose<float>(true, true)), kThreads, 0},
      {"cache_write bf16 from bf16", reinterpret_cast<const void*>(choose<uint16_t>(false, true)), kThreads, 0},
      {"cache_write bf16 from fp32", reinterpret_cast<const void*>(choose<float>(false, true)), kThreads, 0},
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
