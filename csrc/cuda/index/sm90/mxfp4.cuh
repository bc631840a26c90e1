// MXFP4 keys as e4m3, in the registers that wgmma multiplies from.
//
// e4m3 holds every e2m1 number times 2^6 down to 2^-8. So a key's groups are divided by its largest scale and
// multiplied by 2^6, which is exact unless a scale is less than 2^-14 of the largest: one product, and then one factor
// a key. Keys whose scales lie further apart are scored again, one by one.
//
// A lane has a group of 32 dims, as wgmma's order of dims is free: its 16 bytes of a key are the words of four steps,
// eight dims of each. Queries lie in the same order (mx_piece, mx_word).
#pragma once

#include <cstdint>

#include "cuda/common/swizzle.cuh"
#include "cuda/index/sm90/lists.h"
#include "mla/number.h"

namespace mla::cuda::index::sm90 {

constexpr int kMxApart = 14;  // the powers of two between scales that one product takes
constexpr int kKeyGroups = kIndexDim / kMxGroup;
constexpr float kMxUnit = 0x1p-6f;  // of a key's largest scale

struct MxTile {
  alignas(128) uint8_t bytes[kTileKeys * kIndexDim / 2];

  __device__ uint32_t address() const { return cast_smem_ptr_to_uint(bytes); }
};

// Of each distance from the key's largest scale: the eight magnitudes of e2m1 times 2^6 less the distance, as e4m3 with
// a sign.
struct MxTables {
  uint2 magnitudes[kMxApart + 2];  // the last one: further apart; its numbers don't matter
  uint32_t half_signs;             // a constant that the compiler doesn't know: it would move it for each use

  __device__ void init() {
    half_signs = 0x40404040u;
    if (threadIdx.x >= kMxApart + 2) return;
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = float_to_e4m3(e2m1_to_float(i) * two_to(6 - static_cast<int>(threadIdx.x)));
      words[i / 4] |= (0x80u | byte) << i % 4 * 8;
    }
    magnitudes[threadIdx.x] = make_uint2(words[0], words[1]);
  }
};

// Where the dims 4 * word and the next three lie among a query's: the 16-byte piece, and the word in it.
__host__ __device__ constexpr int mx_piece(int word) { return word % 8; }
__host__ __device__ constexpr int mx_word(int word) { return word / 8; }

// A lane's group in two rows of a tile, 8 apart: how far its scales are from the key's largest, and these. In halves of
// a register.
struct MxScales {
  uint32_t largest, apart;

  MxScales() = default;
  __device__ MxScales(const float* scales, uint32_t group) {
    const auto* own = reinterpret_cast<const uint8_t*>(scales) + group;
    const uint32_t both = own[0] | uint32_t{own[8 * kKeyGroups]} << 16;
    largest = __vmaxu2(both, __shfl_xor_sync(~0u, both, 1));
    largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, 2));
    apart = largest - both;
  }
  __device__ uint32_t table(int half) const { return __vminu2(apart, (kMxApart + 1) * 0x10001u) >> 16 * half & 0xffff; }
  // Whether any of the two, or the one, is more than kMxApart away, or no number.
  __device__ uint32_t far_apart() const {
    return (apart + (0x7fff - kMxApart) * 0x10001u | largest + (0x8000 - kMxNan) * 0x10001u) & 0x80008000u;
  }
  __device__ bool far_apart(int half) const { return far_apart() >> 16 * half & 0x8000; }
  __device__ float factor(int half) const {
    return bits_float(max(__byte_perm(largest, 0, half ? 0x4244 : 0x4044) << 7, 0x00400000u));  // 2^-127 has its own
  }
};

// Four bytes by the low three bits of four nibbles, or 0 where bit 3 is set: the bytes have no bit 7.
__device__ __forceinline__ uint32_t look_up(uint32_t low, uint32_t high, uint32_t nibbles) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(nibbles));
  return bytes;
}

// Four e2m1 numbers, in the lower 16 bits of `magnitudes` without their signs, as e4m3. The sign goes where there is
// none.
__device__ __forceinline__ uint32_t mx_four(uint2 table, uint32_t magnitudes, uint32_t nibbles, uint32_t half_signs) {
  return look_up(table.x, table.y, magnitudes) - 2 * look_up(half_signs, half_signs, nibbles);
}

// A lane's part of a tile, for the four steps of the product. `group` is its first one of two, of all groups of a tile.
__device__ __forceinline__ void mx_to_e4m3(const MxTile& tile, const MxTables& tables, uint32_t half_signs,
                                           uint32_t group, const MxScales& scales, uint32_t (&a)[kIndexDim / 32][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 own = reinterpret_cast<const uint4*>(tile.bytes)[group + 8 * kKeyGroups * half];
    const uint2 table = tables.magnitudes[scales.table(half)];
    const uint32_t words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t magnitudes = words[k] & 0x77777777u;
      a[k][half] = mx_four(table, magnitudes, words[k], half_signs);
      a[k][2 + half] = mx_four(table, magnitudes >> 16, words[k] >> 16, half_signs);
    }
  }
}

// One product, whatever the scales: the four bytes of `scales`.
template <int kColumns>
__device__ float mx_product(const MxTile& tile, uint32_t scales, int row, const SwizzledRows<kColumns>& queries,
                            int column) {
  float product = 0.0f;
#pragma unroll 1
  for (int group = 0; group < 4; ++group) {
    float sum = 0.0f;
#pragma unroll 1
    for (int dim = kMxGroup * group; dim < kMxGroup * (group + 1); ++dim) {
      const uint32_t query =
          queries
              .bytes[queries.address(column, mx_piece(dim / 4)) - queries.address() + 4 * mx_word(dim / 4) + dim % 4];
      const uint32_t pair = tile.bytes[row * (kIndexDim / 2) + dim / 2];
      sum = fmaf(e4m3_to_float(query), e2m1_to_float(dim % 2 ? pair >> 4 : pair & 15), sum);
    }
    product = fmaf(sum, ue8m0_to_float(scales >> 8 * group & 255), product);
  }
  return product;
}

}  // namespace mla::cuda::index::sm90
