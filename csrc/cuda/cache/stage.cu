// Stages fp8_ds_mla rows for m64: exactly what its producer warps make of them. A warp has eight
// rows, all of which are on their way before it waits for any.
#include "cuda/common/e4m3.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"
#include "mla/number.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpRows = 8;
constexpr int kCtaRows = kThreads / 32 * kWarpRows;
constexpr int kPieces = 2;    // of a row, that a lane has: 8 latent values each, so that lanes write side by side
constexpr int kRopeRows = 4;  // whose rope a warp moves at once, 8 values a lane

// kAligned: to the size of what is loaded.
template <bool kAligned, typename Words>
__device__ __forceinline__ void load_words(const uint8_t* from, Words& to) {
  if constexpr (kAligned)
    to = *reinterpret_cast<const Words*>(from);
  else
    memcpy(&to, from, sizeof(to));
}

// Two bf16 numbers times a power of two.
__device__ __forceinline__ uint32_t times_power(uint32_t pair, float by) {
  return pack_bf16(bits_float(pair << 16) * by, bits_float(pair & 0xffff0000u) * by);
}

// kAligned: rows of the cache, to 16 bytes. Staged rows always are.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ StageProblem p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t request = blockIdx.x % p.requests;
  const int64_t rows = p.rows(request), first = blockIdx.x / p.requests * kCtaRows + warp * kWarpRows;
  if (first >= rows) return;

  // of row lane % 8
  int64_t slot = 0, staged_slot = 0;
  const int64_t own = first + lane % kWarpRows;
  const bool found = own < rows && p.find(request, own, slot, staged_slot);
  const auto from = reinterpret_cast<uint64_t>(found ? p.cache.row(slot) : nullptr);
  const auto to = reinterpret_cast<uint64_t>(found ? p.staged.row(staged_slot) : nullptr);
  const auto from_of = [&](int row) { return reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, from, row)); };
  const auto to_of = [&](int row) { return reinterpret_cast<uint8_t*>(__shfl_sync(~0u, to, row)); };

  uint2 fp8[kWarpRows][kPieces] = {};
  uint4 rope[kWarpRows / kRopeRows] = {};
  float scale = 0.0f;  // of row lane % 8, group lane / 8
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    const uint8_t* const row = from_of(i);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (row) load_words<kAligned>(row + (32 * piece + lane) * sizeof(uint2), fp8[i][piece]);
  }
#pragma unroll
  for (int i = 0; i < kWarpRows / kRopeRows; ++i) {
    const uint8_t* const row = from_of(kRopeRows * i + lane / 8);
    if (row) load_words<kAligned>(row + kFp8DsMla.rope_offset() + lane % 8 * sizeof(uint4), rope[i]);
  }
  if (found)
    load_words<kAligned>(reinterpret_cast<const uint8_t*>(from) + kFp8DsMla.scale_offset() + 4 * (lane / 8), scale);

  float largest = fabsf(scale);
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
  const int excess = excess_power(largest);
  scale *= two_to(-kUsualPower - excess);
  if (found && lane < kWarpRows) *p.staged.scales(staged_slot) = static_cast<uint8_t>(excess);

#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
    uint8_t* const row = to_of(i);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const float by = __shfl_sync(~0u, scale, (2 * piece + lane / 16) * kWarpRows + i);
      const uint2 bytes = fp8[i][piece];
      const uint4 numbers = times<Number::f16>(e4m3_to_f16(bytes.x, bytes.y), pack_f16(by, by));
      if (row) reinterpret_cast<uint4*>(row)[32 * piece + lane] = numbers;
    }
  }
#pragma unroll
  for (int i = 0; i < kWarpRows / kRopeRows; ++i) {
    const int which = kRopeRows * i + lane / 8;
    uint8_t* const row = to_of(which);
    uint4 numbers = rope[i];
    if (const int own_excess = __shfl_sync(~0u, excess, which)) {
      const float down = two_to(-own_excess);
      numbers = {times_power(numbers.x, down), times_power(numbers.y, down), times_power(numbers.z, down),
                 times_power(numbers.w, down)};
    }
    if (row) reinterpret_cast<uint4*>(row + kStaged.rope_offset())[lane % 8] = numbers;
  }
}

}  // namespace

void stage_rows(const StageProblem& p, void* stream) {
  const int64_t chunks = (p.max_blocks * p.cache.block_size + kCtaRows - 1) / kCtaRows;
  launch(rows_aligned16(p.cache) ? stage_kernel<true> : stage_kernel<false>, static_cast<unsigned>(p.requests * chunks),
         kThreads, 0, stream, "stage_rows", p);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {{"stage_rows", reinterpret_cast<const void*>(stage_kernel<true>), kThreads, 0}};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
