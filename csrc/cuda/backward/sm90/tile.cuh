// What the Hopper kernels of the backward share: how rows become tiles, and how sums leave registers.
//
// Tiles are as those of attention (attention/sm90/tile.h), blocks of 64 dims and 64 rows, but pieces keep their order
// in every block: nothing is converted here.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/tile.h"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/wgmma.cuh"
#include "mla/backward.h"

namespace mla::cuda::sm90::backward {

constexpr int kPieceNumbers = kPieceBytes / 2;
constexpr int kRowPieces = kRowBytes / kPieceBytes;        // of a row in a block
constexpr int kLatentPieces = kLatentBlocks * kRowPieces;  // of a row's first 512 dims
constexpr int kHalfBlocks = kLatentBlocks / 2;             // 256 dims: what a warp copies at once
constexpr int kHalfBytes = kHalfBlocks * kBlockBytes;

template <int kBlocks>
constexpr int kWidth = kBlocks * kBlockDims;

// A warp copies rows into rows `first` and on of a tile, a multiple of eight: the left 256 dims, or the others. `own`
// is where the row of this lane's number begins, in pieces from `rows` on, or kNoRow: then zeros are written. The
// tile's blocks lie kBytes apart.
template <int kRows, int kBlocks, int kHalf, int kBytes = kBlockBytes>
__device__ __forceinline__ void copy_rows(uint32_t tile, int first, const uint16_t* rows, uint32_t own, int lane) {
  const int block = kHalf * kHalfBlocks + lane / kRowPieces, piece = lane % kRowPieces;
  const uint32_t to = tile + block * kBytes + first * kRowBytes + piece * kPieceBytes;
  // hidden, or the compiler keeps what it is made of, too
  auto from = reinterpret_cast<uint64_t>(rows) + (kHalf * 32 + lane) * kPieceBytes;
  hide(from);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    copy_piece((to ^ i % 8 * kPieceBytes) + i * kRowBytes, reinterpret_cast<const uint8_t*>(from),
               __shfl_sync(~0u, own, i));
  if constexpr (kHalf == 1 && kBlocks > kLatentBlocks) {  // eight lanes a row
    const int group = lane / kRowPieces;
    const uint32_t rope = tile + kLatentBlocks * kBytes + (first + group) * kRowBytes + (piece ^ group) * kPieceBytes;
    auto rope_from = reinterpret_cast<uint64_t>(rows) + (kLatentPieces + piece) * kPieceBytes;
    hide(rope_from);
#pragma unroll
    for (int i = 0; i < kRows; i += 4)
      copy_piece((rope ^ i % 8 * kPieceBytes) + i * kRowBytes, reinterpret_cast<const uint8_t*>(rope_from),
                 __shfl_sync(~0u, own, i + group));
  }
}

// Sums of 64 x 64, as wgmma has them, as pairs: [2 * j + half] are columns 8 * j + 2 * (lane % 4) and the next, of row
// lane / 4 or the one 8 further on.
template <int kFirst = 0, int kSums>
__device__ __forceinline__ void pack_sums(uint32_t (&pairs)[16], const float (&sum)[kSums]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) pairs[i] = pack_bf16(sum[kFirst + 2 * i], sum[kFirst + 2 * i + 1]);
}

// It is written once and read much later, so it should not drive kv out of L2.
__device__ __forceinline__ void store_streaming(uint16_t* to, uint4 piece) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(piece.x), "r"(piece.y), "r"(piece.z),
               "r"(piece.w)
               : "memory");
}

// Four lanes have pairs of a row, of four times 8 columns. Afterwards each has all four of one: columns 8 * (lane % 4)
// to that plus 7.
__device__ __forceinline__ uint4 gather_piece(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const uint32_t from_1 = __shfl_xor_sync(~0u, odd ? a : b, 1), from_2 = __shfl_xor_sync(~0u, odd ? c : d, 1);
  const uint32_t first[2] = {odd ? from_1 : a, odd ? b : from_1}, second[2] = {odd ? from_2 : c, odd ? d : from_2};
  const uint32_t low = __shfl_xor_sync(~0u, upper ? first[0] : second[0], 2),
                 high = __shfl_xor_sync(~0u, upper ? first[1] : second[1], 2);
  return upper ? uint4{low, high, second[0], second[1]} : uint4{first[0], first[1], low, high};
}

// The two rows of a lane's sums, in global memory: one and that eight further on.
struct LaneRows {
  uint16_t* row;       // this lane's first piece
  int64_t eight_rows;  // numbers
  bool valid[2];

  // Writes 64 columns. Every lane of a warp calls it.
  __device__ void store(const uint32_t (&pairs)[16], int block, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int first = 8 * i + half;
        const uint4 piece = gather_piece(pairs[first], pairs[first + 2], pairs[first + 4], pairs[first + 6], lane);
        if (valid[half]) store_streaming(row + half * eight_rows + block * kBlockDims + 32 * i, piece);
      }
  }
};

}  // namespace mla::cuda::sm90::backward
