// How Hopper kernels hold cached rows in shared memory as 16-bit numbers: 64 tokens of 576, in blocks of 64 dims. In a
// block a token is a row of 128 bytes, swizzled as wgmma wants it, so that the same numbers serve as rows of K (scores
// sum over dims) and as columns of V (values sum over tokens).
//
// In odd blocks neighbouring 16-byte pieces of the latent dims are swapped. A lane that converts 16 fp8 bytes of a row
// stores two pieces, and in this order eight lanes' first pieces lie in different banks. Queries have the same order;
// results are put right where they leave the registers.
#pragma once

#include <cstdint>

#include "mla/format.h"
#include "mla/platform.h"

namespace mla::cuda::sm90 {

constexpr int kTileTokens = 64;
constexpr int kBlockDims = 64;                       // a row of 128 bytes
constexpr int kLatentBlocks = kLatent / kBlockDims;  // 8
constexpr int kBlocks = kHeadDim / kBlockDims;       // 9, the last one is rope
constexpr int kRowBytes = 128;
constexpr int kPieceBytes = 16;                       // 8 numbers
constexpr int kBlockBytes = kTileTokens * kRowBytes;  // 8 KB
constexpr int kTileBytes = kBlocks * kBlockBytes;     // 72 KB
constexpr int kGroups = 4;                            // of 128 dims that share a scale

// The byte offset, in its row, of the piece of eight dims from 8 * piece on.
MLA_HOST_DEVICE constexpr int offset_of_piece(int block, int piece, int row) {
  return (piece ^ (block & 1) ^ (row & 7)) * kPieceBytes;
}

}  // namespace mla::cuda::sm90
