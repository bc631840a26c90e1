// What the Hopper kernels of the backward share: how rows become tiles, and how accumulators leave registers.
//
// Tiles are those of attention (attention/sm90/tile.h): blocks of 64 dims by 64 rows with the 128-byte swizzle. But odd
// blocks have no extra swap, as nothing is converted here.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/tile.h"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/wgmma.cuh"
#include "mla/backward.h"

namespace mla::cuda::sm90::backward {

constexpr int kPieceNumbers = kPieceBytes / 2;
constexpr int kRowPieces = kRowBytes / kPieceBytes;        // of a row of a block
constexpr int kLatentPieces = kLatentBlocks * kRowPieces;  // of a row's first 512 dims
constexpr int kHalfBlocks = kLatentBlocks / 2;             // 256 dims: a warp copies as many at once
constexpr int kHalfBytes = kHalfBlocks * kBlockBytes;

// Two warpgroups compute, and four warps load.
constexpr int kGroupThreads = 128;
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kProducerWarps = 4;
constexpr int kWarpRows = kTileTokens / kProducerWarps;           // of a tile, per producer warp
constexpr int kArrivals = kProducerWarps * (32 + kWarpArrivals);  // at a barrier of what producers fill

constexpr int kStep = 16;                      // k of a wgmma
constexpr int kStepBytes = kStep * kRowBytes;  // from step to step of an operand that is Major::MN

template <int kBlocks>
constexpr int kWidth = kBlocks * kBlockDims;

__device__ __forceinline__ int tiles_of(int entries) { return entries / kTileTokens + (entries % kTileTokens != 0); }

// A warp copies kRows rows to rows `first` and on of a tile; `first` is a multiple of eight. kHalf 0 copies the left
// 256 dims, kHalf 1 the others. Lane i's `own` is the offset of row i from `rows`, in pieces; kNoRow writes zeros.
// Blocks are kStride bytes apart.
template <int kRows, int kBlocks, int kHalf, int kStride = kBlockBytes>
__device__ __forceinline__ void copy_rows(uint32_t tile, int first, const uint16_t* rows, uint32_t own, int lane) {
  const int block = kHalf * kHalfBlocks + lane / kRowPieces, piece = lane % kRowPieces;
  const uint32_t to = tile + block * kStride + first * kRowBytes + piece * kPieceBytes;
  // hidden, or the compiler keeps its parts in registers, too
  auto from = reinterpret_cast<uint64_t>(rows) + (kHalf * 32 + lane) * kPieceBytes;
  hide(from);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    copy_piece(rows_further(to, i), reinterpret_cast<const uint8_t*>(from), __shfl_sync(~0u, own, i), kPieceBytes);
  if constexpr (kHalf == 1 && kBlocks > kLatentBlocks) {  // eight lanes a row
    const int group = lane / kRowPieces;
    const uint32_t rope = tile + kLatentBlocks * kStride + (first + group) * kRowBytes + offset_in_row(group, piece);
    auto rope_from = reinterpret_cast<uint64_t>(rows) + (kLatentPieces + piece) * kPieceBytes;
    hide(rope_from);
#pragma unroll
    for (int i = 0; i < kRows; i += 4)
      copy_piece(rows_further(rope, i), reinterpret_cast<const uint8_t*>(rope_from), __shfl_sync(~0u, own, i + group),
                 kPieceBytes);
  }
}

// Rounds wgmma's accumulators to pairs of bf16: pairs[2 * j + half] are columns 8 * j + 2 * (lane % 4) and the next, of
// row lane / 4 + 8 * half.
template <int kPairs>
__device__ __forceinline__ void pack_acc(uint32_t (&pairs)[kPairs], const float (&acc)[2 * kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) pairs[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
}

// Transposes among four lanes that each have a pair of each of four times 8 columns. A lane gets all 8 columns from
// 8 * (lane % 4) on.
__device__ __forceinline__ uint4 gather_piece(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const uint32_t from_1 = __shfl_xor_sync(~0u, odd ? a : b, 1), from_2 = __shfl_xor_sync(~0u, odd ? c : d, 1);
  const uint32_t first[2] = {odd ? from_1 : a, odd ? b : from_1}, second[2] = {odd ? from_2 : c, odd ? d : from_2};
  const uint32_t low = __shfl_xor_sync(~0u, upper ? first[0] : second[0], 2),
                 high = __shfl_xor_sync(~0u, upper ? first[1] : second[1], 2);
  return upper ? uint4{low, high, second[0], second[1]} : uint4{first[0], first[1], low, high};
}

// For what is written once and read much later: it should not evict kv from L2.
__device__ __forceinline__ void store_streaming(uint16_t* to, uint4 piece) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(piece.x), "r"(piece.y), "r"(piece.z),
               "r"(piece.w)
               : "memory");
}

__device__ __forceinline__ void store_cached(uint16_t* to, uint4 piece) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(piece.x), "r"(piece.y), "r"(piece.z),
               "r"(piece.w)
               : "memory");
}

// Adds 8 bf16 numbers in L2.
__device__ __forceinline__ void add_piece(uint16_t* to, uint4 piece) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(piece.x),
               "r"(piece.y), "r"(piece.z), "r"(piece.w)
               : "memory");
}

// Adds four fp32 numbers in L2.
__device__ __forceinline__ void add_piece(float* to, uint4 piece) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(bits_float(piece.x)),
               "f"(bits_float(piece.y)), "f"(bits_float(piece.z)), "f"(bits_float(piece.w))
               : "memory");
}

// Brings a warp's 16 rows of accumulators to global memory in whole lines, through 2 KB of swizzled shared memory. A
// lane's addresses differ in bits that are known at compile time.
struct Lines {
  uint32_t stage;  // shared memory, a multiple of 1024 bytes

  // Stores kColumns columns as bf16, from acc[kFirst] on, to columns `begin` and on.
  template <int kColumns, int kFirst = 0, int kAccRegisters>
  __device__ void put_pairs(const float (&acc)[kAccRegisters], int begin, int lane) const {
    if (begin == 0) __syncwarp();  // all lanes have read what was there
    const uint32_t own = stage + lane % 16 * kRowBytes + offset_in_row(lane % 8, lane / 16);
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 8) {
      const float* const x = acc + kFirst + i;
      const uint32_t pairs[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                                 pack_bf16(x[6], x[7])};
      store_tiles(other_piece(own, begin / kPieceNumbers + i / 4), pairs);
    }
    if (begin + kColumns == kBlockDims) __syncwarp();
  }

  // Stores 32 columns of fp32, from acc[kFirst] on.
  template <int kFirst, int kAccRegisters>
  __device__ void put(const float (&acc)[kAccRegisters], int lane) const {
    __syncwarp();
    const uint32_t own = stage + lane / 4 * kRowBytes + offset_in_row(lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(other_piece(own, 2 * j) + 8 * half * kRowBytes),
                     "f"(acc[kFirst + 4 * j + 2 * half]), "f"(acc[kFirst + 4 * j + 2 * half + 1])
                     : "memory");
    __syncwarp();
  }

  // Loads piece lane % 8 of row 4 * i + lane / 8.
  __device__ uint4 take(int i, int lane) const {
    const uint32_t own = stage + lane / 8 * kRowBytes + offset_in_row(lane / 8, lane % 8);
    uint4 piece;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "r"(rows_further(own, 4 * i))
                 : "memory");
    return piece;
  }
};

}  // namespace mla::cuda::sm90::backward
