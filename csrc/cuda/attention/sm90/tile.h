// A tile in shared memory: 64 cached tokens of 576 or 512 16-bit numbers, in blocks of 64 dims. In a block, a token is
// a row of 128 bytes with the 128-byte swizzle of wgmma. So the same numbers serve as K (Major::K) and as V
// (Major::MN).
//
// In odd blocks neighbouring 16-byte pieces are swapped. A lane that converts 16 fp8 bytes of a row stores two pieces:
// with the swap, the first pieces of eight lanes lie in different banks. Queries have the same order. Outputs are
// reordered when they leave the registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/pairs.cuh"
#include "cuda/common/swizzle.cuh"
#include "mla/platform.h"
#include "mla/problem.h"

namespace mla::cuda::sm90 {

constexpr int kTileTokens = 64;
constexpr int kBlockDims = 64;                        // a row of 128 bytes
constexpr int kLatentBlocks = kLatent / kBlockDims;   // 8; the ninth, if any, is rope
constexpr int kBlockBytes = kTileTokens * kRowBytes;  // 8 KB
constexpr int kGroups = 4;                            // of 128 dims with an fp32 scale each

// The rows that a Hopper kernel is compiled for.
enum class Rows {
  fp8_ds_mla,
  staged,  // fp8_ds_mla rows, converted by an earlier kernel; sparse attention in m64 only
  bf16,
  fp16,
  fp8_tensor_576,  // converted to bf16 on load in m64; swap_ab multiplies fp8
  nvfp4_352,       // converted to bf16 on load in m64; swap_ab multiplies f16, converted in registers
  any_512,         // all rows of 512 dims, in any mixture; fp8 is converted to bf16 on load
};

// Stands in for a member that a kernel needs for other rows only.
struct Empty {};

// What else a Hopper kernel is compiled for. Max logits cost registers, and shuffles at a token's end. In dense
// attention slots come from a block table, and earlier queries of a request see less of the last tiles.
enum class Form { sparse, sparse_max_logits, dense };

MLA_HOST_DEVICE constexpr bool is_scaled(Rows rows) { return rows == Rows::fp8_ds_mla; }
// Whether tiles of m64 hold f16 numbers, with a power of two per row.
MLA_HOST_DEVICE constexpr bool has_powers(Rows rows) { return is_scaled(rows) || rows == Rows::staged; }
MLA_HOST_DEVICE constexpr bool is_converted(Rows rows) {
  return rows == Rows::fp8_tensor_576 || rows == Rows::nvfp4_352 || rows == Rows::any_512;
}
// Whether m64 writes the partial results of split tokens as CompactRows. Not for rows with powers: the extra
// code makes tokens that are not split 1 to 4 % slower. Not for fp8_tensor_576: its scale may have any magnitude. So
// may that of fp8_tensor_512, whose partial results lose precision below 2^-114.
MLA_HOST_DEVICE constexpr bool has_compact_splits(Rows rows) {
  return !has_powers(rows) && rows != Rows::fp8_tensor_576;
}
MLA_HOST_DEVICE constexpr int blocks_of(Rows rows) { return kLatentBlocks + (rows != Rows::any_512); }  // of 64 dims
MLA_HOST_DEVICE constexpr int tile_bytes_of(Rows rows) { return blocks_of(rows) * kBlockBytes; }  // of 16-bit numbers
// The type of outputs, and of all operands except those of rows with powers.
MLA_HOST_DEVICE constexpr Number number_of(Rows rows) { return rows == Rows::fp16 ? Number::f16 : Number::bf16; }

inline Rows rows_of(const AttentionProblem& p) {
  switch (p.tile) {
    case TileType::scaled_576:
      return Rows::fp8_ds_mla;
    case TileType::f16_576:
      return Rows::fp16;
    case TileType::bf16_512:
      return Rows::any_512;
    default:
      break;
  }
  const Code code = p.lists[0].cache.format.code;
  return code == Code::e2m1 ? Rows::nvfp4_352 : code == Code::e4m3 ? Rows::fp8_tensor_576 : Rows::bf16;
}

// Calls use(rows, form) with the problem's form as a compile-time constant.
template <typename OfRows, typename Use>
void with_sparse_form_of(const AttentionProblem& p, OfRows rows, Use use) {
  if (p.max_logits) return use(rows, std::integral_constant<Form, Form::sparse_max_logits>{});
  use(rows, std::integral_constant<Form, Form::sparse>{});
}
template <typename OfRows, typename Use>
void with_form_of(const AttentionProblem& p, OfRows rows, Use use) {
  if (p.lists[0].paged) return use(rows, std::integral_constant<Form, Form::dense>{});
  with_sparse_form_of(p, rows, use);
}

// Calls use(rows, form) with both as compile-time constants.
template <typename Use>
void with_kernel_of(const AttentionProblem& p, Use use) {
  switch (rows_of(p)) {
    case Rows::fp8_ds_mla:
      return with_form_of(p, std::integral_constant<Rows, Rows::fp8_ds_mla>{}, use);
    case Rows::bf16:
      return with_form_of(p, std::integral_constant<Rows, Rows::bf16>{}, use);
    case Rows::fp16:
      return with_form_of(p, std::integral_constant<Rows, Rows::fp16>{}, use);
    case Rows::fp8_tensor_576:
      return with_form_of(p, std::integral_constant<Rows, Rows::fp8_tensor_576>{}, use);
    case Rows::nvfp4_352:
      return with_form_of(p, std::integral_constant<Rows, Rows::nvfp4_352>{}, use);
    case Rows::any_512:
      return with_form_of(p, std::integral_constant<Rows, Rows::any_512>{}, use);
    case Rows::staged:  // compiled for few kernels, by their launch.cu
      break;
  }
}

// Neighbouring pieces are swapped in odd blocks.
MLA_HOST_DEVICE constexpr int swapped(int block, int piece) { return piece ^ (block & 1); }
// The byte offset, in its row, of the piece of eight dims from 8 * piece on.
MLA_HOST_DEVICE constexpr int offset_of_piece(int block, int piece, int row) {
  return offset_in_row(row & 7, swapped(block, piece));
}
// A lane that converts 16 fp8 bytes stores pieces 2 * (lane % 4) and the next of block lane / 4.
static_assert(lanes_in_different_banks([](int) { return 0; },
                                       [](int lane) { return swapped(lane / 4, lane % 4 * 2); }));

}  // namespace mla::cuda::sm90
