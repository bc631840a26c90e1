// Reads rows of the paged cache as bf16: a warp a row, 16 latent values a lane.
#include "cuda/common/e4m3.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"
#include "mla/number.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsPerBlock = kThreads / 32;
constexpr int kLaneValues = kLatent / 32;
constexpr int kRopeLanes = 8;
constexpr int kRopeValues = kRope / kRopeLanes;

// Four fp8 numbers times their scale, rounded to bf16.
__device__ __forceinline__ void dequantise(uint32_t fp8, float scale, uint32_t (&numbers)[2]) {
  uint32_t exact[2];
  e4m3_to_bf16(fp8, exact);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float first = bits_float(exact[i] << 16) * scale, second = bits_float(exact[i] & 0xffff0000u) * scale;
    numbers[i] = pack_bf16(first, second);
    if (first != first || second != second)  // the instruction has another NaN
      numbers[i] = float_to_bf16(first) | static_cast<uint32_t>(float_to_bf16(second)) << 16;
  }
}

template <bool kQuantised, bool kAligned>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ CacheGatherProblem p) {
  const int lane = threadIdx.x % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32;
  if (index >= p.rows) return;
  const int64_t slot = p.slots[index];
  const bool valid = p.cache.holds(slot);
  const uint8_t* row = valid ? p.cache.row(slot) : nullptr;

  alignas(16) uint32_t latent[kLaneValues / 2] = {};  // pairs of bf16
  alignas(16) uint16_t rope[kRopeValues] = {};
  if (valid) {
    constexpr int kRopeOffset = kQuantised ? kFp8DsMla.rope_offset() : kBf16.rope_offset();
    if (lane < kRopeLanes) load_bytes<sizeof(rope), kAligned>(row + kRopeOffset + lane * sizeof(rope), rope);
    if constexpr (kQuantised) {
      alignas(16) uint32_t fp8[kLaneValues / 4];
      load_bytes<sizeof(fp8), kAligned>(row + lane * sizeof(fp8), fp8);
      alignas(16) float scales[4];
      load_bytes<sizeof(scales), kAligned>(row + kFp8DsMla.scale_offset(), scales);
      const int group = lane / (kFp8DsMla.group / kLaneValues);
      const float scale = group < 2 ? (group == 0 ? scales[0] : scales[1]) : (group == 2 ? scales[2] : scales[3]);
#pragma unroll
      for (int i = 0; i < kLaneValues / 4; ++i) {
        uint32_t numbers[2];
        dequantise(fp8[i], scale, numbers);
        latent[2 * i] = numbers[0];
        latent[2 * i + 1] = numbers[1];
      }
    } else {
      load_bytes<sizeof(latent), kAligned>(row + lane * sizeof(latent), latent);
    }
  }
  uint16_t* out = p.out + index * p.out_row;
  store_bytes<sizeof(latent), kAligned>(latent, out + lane * kLaneValues);
  if (lane < kRopeLanes) store_bytes<sizeof(rope), kAligned>(rope, out + kLatent + lane * kRopeValues);
}
using Kernel = void (*)(CacheGatherProblem);

Kernel choose(bool quantised, bool aligned) {
  if (quantised) return aligned ? gather_kernel<true, true> : gather_kernel<true, false>;
  return aligned ? gather_kernel<false, true> : gather_kernel<false, false>;
}

}  // namespace

void cache_gather(const CacheGatherProblem& p, void* stream) {
  const bool aligned = rows_aligned16(p.cache) && aligned16(p.out, p.out_row * 2);
  const Kernel kernel = choose(p.cache.format.code == Code::e4m3, aligned);
  launch(kernel, (p.rows + kRowsPerBlock - 1) / kRowsPerBlock, kThreads, 0, stream, "cache_gather", p);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"cache_gather fp8_ds_mla", reinterpret_cast<const void*>(choose(true, true)), kThreads, 0},
      {"cache_gather bf16", reinterpret_cast<const void*>(choose(false, true)), kThreads, 0},
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
