// How Hopper kernels hold cached rows in shared memory as 16-bit numbers: 64 tokens of 576 or 512, in blocks of 64
// dims. In a block a token is a row of 128 bytes, swizzled as wgmma wants it, so that the same numbers serve as rows of
// K (scores sum over dims) and as columns of V (values sum over tokens).
//
// In odd blocks neighbouring 16-byte pieces are swapped. A lane that converts 16 fp8 bytes of a row stores two pieces,
// and in this order eight lanes' first pieces lie in different banks. Queries have the same order; results are put
// right where they leave the registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/pairs.cuh"
#include "mla/platform.h"
#include "mla/problem.h"

namespace mla::cuda::sm90 {

constexpr int kTileTokens = 64;
constexpr int kBlockDims = 64;                       // a row of 128 bytes
constexpr int kLatentBlocks = kLatent / kBlockDims;  // 8; if there is a ninth, it is rope
constexpr int kRowBytes = 128;
constexpr int kPieceBytes = 16;                       // 8 numbers
constexpr int kBlockBytes = kTileTokens * kRowBytes;  // 8 KB
constexpr int kGroups = 4;                            // of 128 dims that share an fp32 scale

// The rows that a Hopper kernel is compiled for.
enum class Rows {
  fp8_ds_mla,
  staged,  // fp8_ds_mla rows that have been converted; sparse attention in many_heads only
  bf16,
  fp16,
  fp8_tensor_576,  // become bf16 numbers when they are loaded, but not with few heads
  any_512,         // bf16_512, fp8_model1 and fp8_528, which become bf16 numbers too, in any mixture
};

// In place of what a kernel needs for other rows.
struct Empty {};

// What else a Hopper kernel is compiled for. Max logits cost registers and, at a token's end, shuffles. In dense
// attention slots come from pages, and a token's queries may see less of its last tiles.
enum class Form { sparse, sparse_max_logits, dense };

MLA_HOST_DEVICE constexpr bool is_scaled(Rows rows) { return rows == Rows::fp8_ds_mla; }
// Whether a tile of many_heads holds f16 numbers, with a power of two a row.
MLA_HOST_DEVICE constexpr bool has_powers(Rows rows) { return is_scaled(rows) || rows == Rows::staged; }
MLA_HOST_DEVICE constexpr bool is_converted(Rows rows) { return rows == Rows::fp8_tensor_576 || rows == Rows::any_512; }
// Whether many_heads writes the parts of cut tokens as CompactRows. With powers whole tokens, which have no parts, take
// 1 to 4 % longer then. A tensor's scale may have any size and sign.
MLA_HOST_DEVICE constexpr bool has_compact_parts(Rows rows) {
  return !has_powers(rows) && rows != Rows::fp8_tensor_576;
}
MLA_HOST_DEVICE constexpr int blocks_of(Rows rows) { return kLatentBlocks + (rows != Rows::any_512); }  // of 64 dims
MLA_HOST_DEVICE constexpr int tile_bytes_of(Rows rows) { return blocks_of(rows) * kBlockBytes; }  // of 16-bit numbers
// Of outputs and, but for rows with powers, of everything that is multiplied.
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
      return p.lists[0].cache.format.quantised() ? Rows::fp8_tensor_576 : Rows::bf16;
  }
}

// Calls `use` with the form of a problem as a compile-time constant, and `rows` before it.
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

// Calls `use` with the rows and the form of a problem as compile-time constants.
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
    case Rows::any_512:
      return with_form_of(p, std::integral_constant<Rows, Rows::any_512>{}, use);
    case Rows::staged:  // which few kernels are compiled for
      break;
  }
}

// The byte offset, in its row, of the piece of eight dims from 8 * piece on.
MLA_HOST_DEVICE constexpr int offset_of_piece(int block, int piece, int row) {
  return (piece ^ (block & 1) ^ (row & 7)) * kPieceBytes;
}

}  // namespace mla::cuda::sm90
