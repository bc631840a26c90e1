// Rotation of queries: 16 lanes a head of a token, 8 numbers a lane. A lane asks for its numbers and for the position
// at the same time; only cosines and sines wait for the position.
#include "cuda/common/e4m3.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/order.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256, kLaneNumbers = 8;
constexpr int kLanes = kIndexDim / kLaneNumbers, kRopeLanes = kRope / kLaneNumbers;
constexpr int kHeads = kThreads / kLanes;  // of a block
constexpr int kPairs = kRope / 2;

// kAligned: so are all rows, to 16 bytes.
template <bool kAligned>
__device__ __forceinline__ void load_numbers(const uint16_t* from, float (&numbers)[kLaneNumbers]) {
  alignas(16) uint16_t bits[kLaneNumbers];
  load_bytes<16, kAligned>(from, bits);
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) numbers[i] = bf16_to_float(bits[i]);
}

// kCount neighbours, 4 or 8, from `at` on.
template <int kCount, bool kAligned>
__device__ __forceinline__ void load_row(const Rotations& rotations, int64_t at, float (&numbers)[kCount]) {
  if (rotations.fp32) {
    alignas(16) float four_bytes[kCount];
    load_bytes<4 * kCount, kAligned>(static_cast<const float*>(rotations.data) + at, four_bytes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = four_bytes[i];
  } else {
    const auto* from = static_cast<const uint16_t*>(rotations.data) + at;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      uint2 two_bytes;
      if constexpr (kAligned)
        two_bytes = *reinterpret_cast<const uint2*>(from + i);
      else
        two_bytes = {from[i] | uint32_t{from[i + 1]} << 16, from[i + 2] | uint32_t{from[i + 3]} << 16};
      numbers[i] = bits_float(two_bytes.x << 16), numbers[i + 1] = bits_float(two_bytes.x & 0xffff0000u);
      numbers[i + 2] = bits_float(two_bytes.y << 16), numbers[i + 3] = bits_float(two_bytes.y & 0xffff0000u);
    }
  }
}

// Pairs that are neighbours, and so a lane's own.
template <bool kAligned>
__device__ __forceinline__ void rotate_neighbours(const Rotations& rotations, int64_t row, int lane,
                                                  float (&x)[kLaneNumbers]) {
  constexpr int kOwn = kLaneNumbers / 2;
  float cosine[kOwn], sine[kOwn];
  load_row<kOwn, kAligned>(rotations, row + lane * kOwn, cosine);
  load_row<kOwn, kAligned>(rotations, row + kPairs + lane * kOwn, sine);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) rotate(x[2 * i], x[2 * i + 1], cosine[i], sine[i]);
}

// Pairs of two halves: `other` is the number that belongs to each of a lane's.
template <bool kAligned>
__device__ __forceinline__ void rotate_halves(const Rotations& rotations, int64_t row, int lane,
                                              float (&x)[kLaneNumbers], float (&other)[kLaneNumbers]) {
  const bool first_half = lane < kRopeLanes / 2;
  const int pair = lane % (kRopeLanes / 2) * kLaneNumbers;
  float cosine[kLaneNumbers], sine[kLaneNumbers];
  load_row<kLaneNumbers, kAligned>(rotations, row + pair, cosine);
  load_row<kLaneNumbers, kAligned>(rotations, row + kPairs + pair, sine);
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) {
    float first = first_half ? x[i] : other[i], second = first_half ? other[i] : x[i];
    rotate(first, second, cosine[i], sine[i]);
    x[i] = first_half ? first : second;
  }
}

template <bool kAligned>
__device__ __forceinline__ void index_head(const RotateQueriesProblem& p, int64_t token, int head, int lane,
                                           float (&x)[kLaneNumbers]) {
  const uint32_t lanes = 0xffffu << (threadIdx.x & kLanes);  // of the warp, those of this head
  const float weight = number_at(p.weights, p.weights_fp32, token * p.weight_token + head);
  const int64_t row = rotation_of(p.index_rotations, p.position[token]);
  if (p.interleaved) {
    if (lane < kRopeLanes) rotate_neighbours<kAligned>(p.index_rotations, row, lane, x);
  } else {
    float other[kLaneNumbers];
#pragma unroll
    for (int i = 0; i < kLaneNumbers; ++i) other[i] = __shfl_xor_sync(lanes, x[i], kRopeLanes / 2);
    if (lane < kRopeLanes) rotate_halves<kAligned>(p.index_rotations, row, lane, x, other);
  }
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneNumbers; ++i) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, distance));
  const float scale = group_scale(amax, true), inverse = inverse_of_power(scale);
  uint32_t bytes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    bytes[i] = to_e4m3x2(x[4 * i] * inverse, x[4 * i + 1] * inverse) |
               uint32_t{to_e4m3x2(x[4 * i + 2] * inverse, x[4 * i + 3] * inverse)} << 16;
  uint8_t* out = p.index_out.at(token, head) + lane * kLaneNumbers;
  if constexpr (kAligned)
    *reinterpret_cast<uint2*>(out) = {bytes[0], bytes[1]};
  else
    store_bytes<kLaneNumbers, false>(bytes, out);
  if (lane == 0) p.weights_out[token * p.weight_out_token + head] = weight * p.weight_scale * scale;
}

template <bool kAligned>
__device__ __forceinline__ void attention_head(const RotateQueriesProblem& p, int64_t token, int head, int lane,
                                               float (&x)[kLaneNumbers]) {
  rotate_neighbours<kAligned>(p.rotations, rotation_of(p.rotations, p.position[token]), lane, x);
  const uint4 pairs = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
  uint16_t* out = p.out.at(token, head) + lane * kLaneNumbers;
  if constexpr (kAligned)
    __stwb(reinterpret_cast<uint4*>(out), pairs);  // an assignment becomes four stores
  else
    store_bytes<16, false>(&pairs, out);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) rotate_kernel(const __grid_constant__ RotateQueriesProblem p) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kLanes;
  int head = blockIdx.y * kHeads + threadIdx.x / kLanes;
  const bool of_index = head < p.index_heads;
  if (!of_index) head -= p.index_heads;
  if (!of_index && (head >= p.heads || lane >= kRopeLanes)) return;
  const uint16_t* query = of_index ? p.index_queries.data + token * p.index_queries.token + head * p.index_queries.head
                                   : p.queries.data + token * p.queries.token + head * p.queries.head;
  float x[kLaneNumbers];
  load_numbers<kAligned>(query + lane * kLaneNumbers, x);
  if (of_index)
    index_head<kAligned>(p, token, head, lane, x);
  else
    attention_head<kAligned>(p, token, head, lane, x);
}

bool aligned(const Rotations& rotations) {
  return aligned16(rotations.data, (rotations.fp32 ? 4 : 2) * rotations.stride);
}

}  // namespace

void rotate_queries(const RotateQueriesProblem& p, void* stream) {
  const bool all_aligned =
      aligned16(p.queries.data, 2 * p.queries.token) && aligned16(p.queries.data, 2 * p.queries.head) &&
      aligned16(p.index_queries.data, 2 * p.index_queries.token) &&
      aligned16(p.index_queries.data, 2 * p.index_queries.head) && aligned16(p.out.data, 2 * p.out.token) &&
      aligned16(p.out.data, 2 * p.out.head) && aligned16(p.index_out.data, p.index_out.token) &&
      aligned16(p.index_out.data, p.index_out.head) && aligned(p.rotations) && aligned(p.index_rotations);
  const dim3 blocks(static_cast<uint32_t>(p.tokens), (p.heads + p.index_heads + kHeads - 1) / kHeads);
  launch_pdl(all_aligned ? rotate_kernel<true> : rotate_kernel<false>, blocks, kThreads, 0, stream, "rotate_queries",
             p);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"rotate_queries", reinterpret_cast<const void*>(rotate_kernel<true>), kThreads, 0},
      {"rotate_queries, not aligned", reinterpret_cast<const void*>(rotate_kernel<false>), kThreads, 0},
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
