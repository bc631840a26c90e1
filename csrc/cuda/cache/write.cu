// Writes tokens into the paged cache: a warp a token. Everything that a warp reads is on its way before it waits for
// any of it, slot or not, and what is computed takes less time than the memory: then the cache is written about as fast
// as it could be copied.
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/common/e4m3.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTokensPerCta = kThreads / 32;
constexpr int kRopeLanes = 8;  // lanes that each carry 8 rope values
constexpr int kRopeValues = kRope / kRopeLanes;

// What comes in: fp32, or the 16-bit numbers that queries are.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(Bf16 x) { return bf16_to_float(x.bits); }
// As a row of 16-bit numbers has it.
template <Code kCode>
__device__ __forceinline__ uint16_t as_stored(float x) {
  return kCode == Code::f16 ? float_to_f16(x) : float_to_bf16(x);
}
template <Code kCode>
__device__ __forceinline__ uint16_t as_stored(Bf16 x) {
  return x.bits;
}
template <Code kCode>
__device__ __forceinline__ uint16_t as_stored(F16 x) {
  return x.bits;
}

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

// CTAs that a multiprocessor should hold, so that enough is on its way.
template <typename Number, bool kAligned>
constexpr int kMinCtas = kAligned ? (sizeof(Number) == 2 ? 12 : 10) : 1;

// Sixteen or eight numbers divided by a scale, as e4m3.
template <int kValues, typename Number>
__device__ __forceinline__ void quantise(uint16_t (&fp8)[kValues / 2], const Number (&values)[kValues], float scale,
                                         bool ordinary) {
  if (ordinary) {
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
}

// Number: how kv_c and k_pe come. kFormat: of kFormats, by number.
template <typename Number, int kFormat, bool kAligned>
__global__ void __launch_bounds__(kThreads, kMinCtas<Number, kAligned>)
    write_kernel(const __grid_constant__ CacheWriteProblem p) {
  constexpr CacheFormat kRows = *kFormats[kFormat];
  // A lane has 16 latent values in a row, so that lanes side by side share a scale, or twice 8, so that lanes write
  // side by side.
  constexpr int kPieces = kRows.quantised() ? 1 : 2;
  constexpr int kValues = 16 / kPieces;
  static_assert(kRows.latent % (16 * 4) == 0 && (kRows.rope == 0 || kRows.rope == kRope));
  const int lane = threadIdx.x % 32;
  const bool has_latent = kRows.latent == 32 * 16 || lane < kRows.latent / 16;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokensPerCta + threadIdx.x / 32;
  int64_t slot = -1;
  alignas(16) Number latent[kPieces][kValues];
  if constexpr (kRows.latent < 32 * 16) memset(latent, 0, sizeof(latent));
  alignas(16) Number rope[kRopeValues];
  if (token < p.tokens) {  // a branch of its own, as the compiler would else load latent only once it knows the slot
    slot = p.slots[token];
    const Number* from = static_cast<const Number*>(p.latent) + token * p.latent_token;
    if (has_latent) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        load_bytes<sizeof(latent[i]), kAligned>(from + (32 * i + lane) * kValues, latent[i]);
    }
    from = static_cast<const Number*>(p.rope) + token * p.rope_token;
    if (kRows.rope > 0 && lane < kRopeLanes) load_bytes<sizeof(rope), kAligned>(from + lane * kRopeValues, rope);
  }
  if (!p.cache.holds(slot)) return;
  uint8_t* row = p.cache.row(slot);

  if constexpr (kRows.code == Code::e2m1) {
    static_assert(kRows.group == kValues);
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) amax = fmaxf(amax, fabsf(as_float(latent[0][i])));  // leaves NaN out
    const uint8_t scale = nvfp4_group_scale(amax);
    const float inverse = __frcp_rn(e4m3_to_float(scale));
    uint32_t words[kValues / 8] = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      words[i / 8] |= float_to_e2m1(__fmul_rn(as_float(latent[0][i]), inverse)) << i % 8 * 4;
    store_bytes<sizeof(words), kAligned>(words, row + lane * sizeof(words));
    p.cache.scales(slot)[nvfp4_scale(lane)] = scale;
  } else if constexpr (kRows.quantised()) {
    const Number(&values)[kValues] = latent[0];
    constexpr int kGroupLanes = kRows.group > 0 ? kRows.group / kValues : 32;
    float scale = p.scale;
    bool ordinary = false;
    if constexpr (kRows.group > 0) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kValues; ++i) amax = fmaxf(amax, fabsf(as_float(values[i])));  // leaves NaN out
#pragma unroll
      for (int distance = 1; distance < kGroupLanes; distance *= 2)
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
      scale = group_scale(amax, p.power_of_two || kRows.scale == Scale::ue8m0);
      ordinary = is_ordinary(scale);
    }
    alignas(16) uint16_t fp8[kValues / 2];
    quantise<kValues>(fp8, values, scale, ordinary);
    if (has_latent) store_bytes<sizeof(fp8), kAligned>(fp8, row + lane * kValues);
    if constexpr (kRows.group > 0) {
      uint8_t* const scales = p.cache.scales(slot);
      const int group = lane / kGroupLanes;
      if constexpr (kRows.scale == Scale::fp32) {
        if (lane % kGroupLanes == 0) store_bytes<4, kAligned>(&scale, scales + 4 * group);
      } else {
        static_assert(kRows.scale_padding <= 32 / kGroupLanes - kRows.scales(),
                      "lanes without values write the padding");
        if (lane % kGroupLanes == 0 && group < kRows.scales() + kRows.scale_padding)
          scales[group] = has_latent ? power_to_ue8m0(scale) : 0;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      alignas(16) uint16_t values[kValues];
#pragma unroll
      for (int k = 0; k < kValues; ++k) values[k] = as_stored<kRows.code>(latent[i][k]);
      store_bytes<sizeof(values), kAligned>(values, row + (32 * i + lane) * sizeof(values));
    }
  }

  if (kRows.rope > 0 && lane < kRopeLanes) {
    alignas(16) uint16_t values[kRopeValues];
    uint8_t* const to = row + kRows.rope_offset();
    if constexpr (kRows.rope_code == Code::e4m3) {
      alignas(16) uint16_t fp8[kRopeValues / 2];
      quantise<kRopeValues>(fp8, rope, p.scale, false);
      store_bytes<sizeof(fp8), kAligned>(fp8, to + lane * sizeof(fp8));
    } else {
#pragma unroll
      for (int i = 0; i < kRopeValues; ++i) values[i] = as_stored<kRows.rope_code>(rope[i]);
      store_bytes<sizeof(values), kAligned>(values, to + lane * sizeof(values));
    }
  }
}
using Kernel = void (*)(CacheWriteProblem);

template <int kFormat>
Kernel choose(Source source, bool aligned) {
  using Half = std::conditional_t<kFormats[kFormat]->code == Code::f16, F16, Bf16>;
  if (source == Source::fp32) return aligned ? write_kernel<float, kFormat, true> : write_kernel<float, kFormat, false>;
  return aligned ? write_kernel<Half, kFormat, true> : write_kernel<Half, kFormat, false>;
}

template <int... kFormat>
Kernel choose(int format, Source source, bool aligned, std::integer_sequence<int, kFormat...>) {
  Kernel kernel = nullptr;
  ((format == kFormat ? void(kernel = choose<kFormat>(source, aligned)) : void()), ...);
  return kernel;
}

using EveryFormat = std::make_integer_sequence<int, kFormatCount>;

}  // namespace

void cache_write(const CacheWriteProblem& p, void* stream) {
  const int64_t number = p.source == Source::fp32 ? 4 : 2;
  const bool aligned = aligned16(p.latent, p.latent_token * number) && aligned16(p.rope, p.rope_token * number) &&
                       rows_aligned16(p.cache);
  const Kernel kernel = choose(number_of(p.cache.format), p.source, aligned, EveryFormat{});
  launch(kernel, (p.tokens + kTokensPerCta - 1) / kTokensPerCta, kThreads, 0, stream, "cache_write", p);
}

MLA_KERNELS {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> names;
    for (const char* source : {" from 16 bits", " from fp32"})
      for (const CacheFormat* format : kFormats) names.push_back(std::string("cache_write ") + format->name + source);
    return names;
  }();
  static const std::vector<KernelEntry> entries = [] {
    std::vector<KernelEntry> entries;
    for (const Source source : {Source::bf16, Source::fp32})
      for (int format = 0; format < kFormatCount; ++format) {
        const auto kernel = choose(format, source, true, EveryFormat{});
        entries.push_back({names[entries.size()].c_str(), reinterpret_cast<const void*>(kernel), kThreads, 0});
      }
    return entries;
  }();
  return {entries.data(), static_cast<int>(entries.size())};
}

}  // namespace mla::cuda
