// Reads rows of the paged cache as 16-bit numbers: a warp a row, 16 latent values a lane.
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/e4m3.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/pairs.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"
#include "mla/number.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsPerCta = kThreads / 32;
constexpr int kLaneValues = kLatent / 32;
constexpr int kRopeLanes = 8;
constexpr int kRopeValues = kRope / kRopeLanes;

// fp8 numbers times their scale, rounded to bf16.
template <int kWords>
__device__ __forceinline__ void dequantise(const uint32_t (&fp8)[kWords], float scale, uint32_t (&pairs)[2 * kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    uint32_t exact[2];
    e4m3_to_bf16(fp8[w], exact);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float first = bits_float(exact[i] << 16) * scale, second = bits_float(exact[i] & 0xffff0000u) * scale;
      uint32_t& pair = pairs[2 * w + i];
      pair = pack_bf16(first, second);
      if (first != first || second != second)  // the instruction has another NaN
        pair = float_to_bf16(first) | static_cast<uint32_t>(float_to_bf16(second)) << 16;
    }
  }
}

template <bool kAligned>
__device__ __forceinline__ float load_float(const uint8_t* from) {
  if constexpr (kAligned) return *reinterpret_cast<const float*>(from);
  float number;
  memcpy(&number, from, sizeof(number));
  return number;
}

// kFormat: of kFormats, by number.
template <int kFormat, bool kAligned>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ CacheGatherProblem p) {
  constexpr CacheFormat kRows = *kFormats[kFormat];
  const int lane = threadIdx.x % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kRowsPerCta + threadIdx.x / 32;
  if (index >= p.rows) return;
  const int64_t slot = p.slots[index];
  const bool valid = p.cache.holds(slot);
  const uint8_t* row = valid ? p.cache.row(slot) : nullptr;
  const bool has_latent = kRows.latent == 32 * kLaneValues || lane < kRows.latent / kLaneValues;

  alignas(16) uint32_t latent[kLaneValues / 2] = {};  // pairs of 16-bit numbers
  alignas(16) uint32_t rope[kRopeValues / 2] = {};
  if (valid) {
    if (kRows.rope > 0 && lane < kRopeLanes) {
      const uint8_t* const from = row + kRows.rope_offset();
      if constexpr (kRows.rope_code == Code::e4m3) {
        uint32_t fp8[kRopeValues / 4];
        memcpy(fp8, from + lane * sizeof(fp8), sizeof(fp8));
        dequantise(fp8, p.scale, rope);
      } else {
        load_bytes<sizeof(rope), kAligned>(from + lane * sizeof(rope), rope);
      }
    }
    if constexpr (kRows.code == Code::e2m1) {
      const float scale = e4m3_to_float(p.cache.scales(slot)[nvfp4_scale(lane)]);
#pragma unroll
      for (int i = 0; i < kLaneValues / 2; ++i) {
        const uint32_t two = row[lane * (kLaneValues / 2) + i];
        latent[i] = float_to_bf16(e2m1_to_float(two) * scale) |
                    static_cast<uint32_t>(float_to_bf16(e2m1_to_float(two >> 4) * scale)) << 16;
      }
    } else if constexpr (kRows.quantised()) {
      if (has_latent) {
        alignas(16) uint32_t fp8[kLaneValues / 4];
        load_bytes<sizeof(fp8), kAligned>(row + lane * sizeof(fp8), fp8);
        float scale = p.scale;
        if constexpr (kRows.group > 0) {
          const int group = lane / (kRows.group / kLaneValues);
          const uint8_t* const scales = p.cache.scales(slot);
          if constexpr (kRows.scale == Scale::ue8m0)
            scale = ue8m0_to_float(scales[group]);
          else
            scale = load_float<kAligned>(scales + 4 * group);
        }
        dequantise(fp8, scale, latent);
      }
    } else {
      load_bytes<sizeof(latent), kAligned>(row + lane * sizeof(latent), latent);
    }
  }
  uint16_t* out = p.out + index * p.out_row;
  if (has_latent) store_bytes<sizeof(latent), kAligned>(latent, out + lane * kLaneValues);
  if (kRows.rope > 0 && lane < kRopeLanes)
    store_bytes<sizeof(rope), kAligned>(rope, out + kRows.latent + lane * kRopeValues);
}
using Kernel = void (*)(CacheGatherProblem);

template <int... kFormat>
Kernel choose(int format, bool aligned, std::integer_sequence<int, kFormat...>) {
  Kernel kernel = nullptr;
  ((format == kFormat ? void(kernel = aligned ? gather_kernel<kFormat, true> : gather_kernel<kFormat, false>) : void()),
   ...);
  return kernel;
}

using EveryFormat = std::make_integer_sequence<int, kFormatCount>;

}  // namespace

void cache_gather(const CacheGatherProblem& p, void* stream) {
  const bool aligned = rows_aligned16(p.cache) && aligned16(p.out, p.out_row * 2);
  const Kernel kernel = choose(number_of(p.cache.format), aligned, EveryFormat{});
  launch(kernel, (p.rows + kRowsPerCta - 1) / kRowsPerCta, kThreads, 0, stream, "cache_gather", p);
}

MLA_KERNELS {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> names;
    for (const CacheFormat* format : kFormats) names.push_back(std::string("cache_gather ") + format->name);
    return names;
  }();
  static const std::vector<KernelEntry> entries = [] {
    std::vector<KernelEntry> entries;
    for (int format = 0; format < kFormatCount; ++format)
      entries.push_back(
          {names[format].c_str(), reinterpret_cast<const void*>(choose(format, true, EveryFormat{})), kThreads, 0});
    return entries;
  }();
  return {entries.data(), static_cast<int>(entries.size())};
}

}  // namespace mla::cuda
