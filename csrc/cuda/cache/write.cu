// Writes tokens into the paged cache: a warp a token, 16 latent values a lane, so that 8 lanes share a scale.
#include "cuda/common/e4m3.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerBlock = kThreads / 32;
constexpr int kLaneValues = kLatent / 32;
constexpr int kRopeLanes = 8;  // lanes that each carry 8 rope values
constexpr int kRopeValues = kRope / kRopeLanes;

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(uint16_t x) { return bf16_to_float(x); }
__device__ __forceinline__ uint16_t as_bf16(float x) { return float_to_bf16(x); }
__device__ __forceinline__ uint16_t as_bf16(uint16_t x) { return x; }

// Number: how kv_c and k_pe come (uint16_t is bf16). kQuantised: e4m3 with fp32 scales, else bf16.
template <typename Number, bool kQuantised, bool kAligned>
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ CacheWriteProblem p) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokensPerBlock + threadIdx.x / 32;
  if (token >= p.tokens) return;
  const int64_t slot = p.slots[token];
  if (!p.cache.holds(slot)) return;
  uint8_t* row = p.cache.row(slot);

  alignas(16) Number latent[kLaneValues];
  load_bytes<sizeof(latent), kAligned>(
      static_cast<const Number*>(p.latent) + token * p.latent_token + lane * kLaneValues, latent);

  if constexpr (kQuantised) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) amax = fmaxf(amax, fabsf(as_float(latent[i])));  // leaves NaN out
    constexpr int kGroupLanes = kFp8DsMla.group / kLaneValues;
#pragma unroll
    for (int distance = 1; distance < kGroupLanes; distance *= 2)
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
    const float scale = group_scale(amax, p.power_of_two);
    alignas(16) uint16_t codes[kLaneValues / 2];
#pragma unroll
    for (int i = 0; i < kLaneValues / 2; ++i)
      codes[i] = to_e4m3x2(__fdiv_rn(as_float(latent[2 * i]), scale), __fdiv_rn(as_float(latent[2 * i + 1]), scale));
    store_bytes<sizeof(codes), kAligned>(codes, row + lane * kLaneValues);
    if (lane % kGroupLanes == 0)
      store_bytes<4, kAligned>(&scale, row + kFp8DsMla.scale_offset() + 4 * (lane / kGroupLanes));
  } else {
    alignas(16) uint16_t values[kLaneValues];
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) values[i] = as_bf16(latent[i]);
    store_bytes<sizeof(values), kAligned>(values, row + lane * sizeof(values));
  }

  if (lane < kRopeLanes) {
    constexpr int kRopeOffset = kQuantised ? kFp8DsMla.rope_offset() : kBf16.rope_offset();
    alignas(16) Number rope[kRopeValues];
    load_bytes<sizeof(rope), kAligned>(static_cast<const Number*>(p.rope) + token * p.rope_token + lane * kRopeValues,
                                       rope);
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

KernelList cache_write_kernels() {
  static const KernelEntry entries[] = {
      {"cache_write fp8_ds_mla from bf16", reinterpret_cast<const void*>(choose<uint16_t>(true, true)), kThreads, 0},
      {"cache_write fp8_ds_mla from fp32", reinterpret_cast<const void*>(choose<float>(true, true)), kThreads, 0},
      {"cache_write bf16 from bf16", reinterpret_cast<const void*>(choose<uint16_t>(false, true)), kThreads, 0},
      {"cache_write bf16 from fp32", reinterpret_cast<const void*>(choose<float>(false, true)), kThreads, 0},
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
