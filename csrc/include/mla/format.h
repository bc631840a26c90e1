// How a cached token is laid out in memory. This is the only description: the CPU and CUDA kernels are
// compiled from it, and Python reads it from the library (mla_backend/formats.py).
#pragma once

#include <cstdint>
#include <cstring>

#include "mla/platform.h"

namespace mla {

enum class Code : int32_t { bf16, f16, e4m3, e2m1 };  // how values are stored
// What a group of values, or all of them, is multiplied with. `power`: see kStaged.
enum class Scale : int32_t { none, fp32, ue8m0, tensor, power, e4m3 };
enum class ScalesAt : int32_t { nowhere, in_row, end_of_page, end_of_row };

// What a kernel multiplies once it has read a row. A power of two times an e4m3 number is a bf16 number, so rows with
// such scales become rows of bf16 numbers.
enum class TileType : int32_t {
  scaled_576,  // e4m3 numbers, with an fp32 scale for each 128, and 64 bf16 numbers
  bf16_576,
  f16_576,
  bf16_512,
  staged_576,  // f16 numbers with a power of two for all of a row, and 64 bf16 numbers
};

// How fp8 rows are multiplied: as exactly as 16-bit ones, or with queries and P rounded to e4m3 for FP8 tensor cores.
// Other rows have one way, and so have kernels for few heads, on CPUs and on older GPUs: the exact one.
enum class Products : int32_t { exact, fp8 };
constexpr const char* kProductsNames[] = {"exact", "fp8"};
constexpr int kProductsCount = sizeof(kProductsNames) / sizeof(kProductsNames[0]);

// A token is `latent` values, then its scales (if they lie in the row, and not at its end), then `rope` values. Queries
// have latent + rope values. Attention sums up the first 512 values of rows.
struct CacheFormat {
  const char* name;
  Code code;  // of the latent values
  int32_t latent;
  Code rope_code;
  int32_t rope;
  Scale scale;
  int32_t group;  // latent values that share a scale; 0 where there are no groups
  ScalesAt scales_at;
  int32_t scale_padding;   // bytes that follow a token's scales
  int32_t page_alignment;  // bytes: a page of a new cache is padded to a multiple

  static MLA_HOST_DEVICE constexpr int32_t bits_of(Code code) {
    return code == Code::e2m1 ? 4 : code == Code::e4m3 ? 8 : 16;
  }
  MLA_HOST_DEVICE constexpr int32_t head_dim() const { return latent + rope; }
  MLA_HOST_DEVICE constexpr int32_t scales() const { return group ? latent / group : 0; }
  MLA_HOST_DEVICE constexpr int32_t latent_bytes() const { return latent * bits_of(code) / 8; }
  MLA_HOST_DEVICE constexpr int32_t rope_bytes() const { return rope * bits_of(rope_code) / 8; }
  MLA_HOST_DEVICE constexpr int32_t scale_bytes() const {
    return scales() * (scale == Scale::fp32 ? 4 : 1) + scale_padding;
  }
  MLA_HOST_DEVICE constexpr int32_t scale_offset() const {  // where they lie in the row
    return latent_bytes() + (scales_at == ScalesAt::end_of_row ? rope_bytes() : 0);
  }
  MLA_HOST_DEVICE constexpr int32_t rope_offset() const {
    return latent_bytes() + (scales_at == ScalesAt::in_row ? scale_bytes() : 0);
  }
  MLA_HOST_DEVICE constexpr int32_t row_bytes() const {
    return rope_offset() + rope_bytes() + (scales_at == ScalesAt::end_of_row ? scale_bytes() : 0);
  }
  MLA_HOST_DEVICE constexpr int32_t token_bytes() const {
    return row_bytes() + (scales_at == ScalesAt::end_of_page ? scale_bytes() : 0);
  }
  MLA_HOST_DEVICE constexpr bool quantised() const { return code == Code::e4m3 || code == Code::e2m1; }
  // Of what a cache tensor is made of: numbers, or bytes where there are scales.
  MLA_HOST_DEVICE constexpr int32_t element_bytes() const { return scale == Scale::none ? bits_of(code) / 8 : 1; }
  MLA_HOST_DEVICE constexpr TileType tile() const {
    if (scale == Scale::fp32) return TileType::scaled_576;
    if (scale == Scale::power) return TileType::staged_576;
    if (code == Code::f16) return TileType::f16_576;
    return head_dim() == 512 ? TileType::bf16_512 : TileType::bf16_576;
  }
};

// The parts of a query of 576 dims, and what comes out.
constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kHeadDim = kLatent + kRope;
constexpr int kValueDim = 512;

constexpr CacheFormat kBf16{"bf16", Code::bf16, 512, Code::bf16, 64, Scale::none, 0, ScalesAt::nowhere, 0, 1};
constexpr CacheFormat kFp16{"fp16", Code::f16, 512, Code::f16, 64, Scale::none, 0, ScalesAt::nowhere, 0, 1};
constexpr CacheFormat kFp8DsMla{"fp8_ds_mla", Code::e4m3,       512, Code::bf16, 64, Scale::fp32,
                                128,          ScalesAt::in_row, 0,   1};
constexpr CacheFormat kBf16_512{"bf16_512", Code::bf16, 512, Code::bf16, 0, Scale::none, 0, ScalesAt::nowhere, 0, 1};
constexpr CacheFormat kFp8Model1{"fp8_model1",          Code::e4m3, 448, Code::bf16, 64, Scale::ue8m0, 64,
                                 ScalesAt::end_of_page, 1,          576};
constexpr CacheFormat kFp8_528{"fp8_528", Code::e4m3, 512, Code::bf16, 0, Scale::ue8m0, 32, ScalesAt::in_row, 0, 1};
constexpr CacheFormat kFp8Tensor576{"fp8_tensor_576",  Code::e4m3, 512, Code::e4m3, 64, Scale::tensor, 0,
                                    ScalesAt::nowhere, 0,          1};
constexpr CacheFormat kFp8Tensor512{"fp8_tensor_512",  Code::e4m3, 512, Code::bf16, 0, Scale::tensor, 0,
                                    ScalesAt::nowhere, 0,          1};
constexpr CacheFormat kNvfp4{"nvfp4_352", Code::e2m1, 512, Code::e4m3, 64, Scale::e4m3, 16, ScalesAt::end_of_row, 0, 1};
// Which of an nvfp4_352 row's scales is that of a group of latent values: the order in which Blackwell reads them.
MLA_HOST_DEVICE constexpr int nvfp4_scale(int group) { return 8 * (group % 4) + group / 4; }

// An fp8_ds_mla row as m64 multiplies it: see StageProblem. No cache is kept in it.
// The power is an int8 e: latent values are 2^(e + kUsualPower) times what is stored, rope 2^e times.
constexpr CacheFormat kStaged{"staged", Code::f16, 512, Code::bf16, 64, Scale::power, 512, ScalesAt::end_of_page,
                              0,        128};

// Every format that a cache may have.
constexpr const CacheFormat* kFormats[] = {&kBf16,    &kFp16,         &kFp8DsMla,     &kBf16_512, &kFp8Model1,
                                           &kFp8_528, &kFp8Tensor576, &kFp8Tensor512, &kNvfp4};
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

// Which of them it is.
inline int number_of(const CacheFormat& format) {
  int number = 0;
  while (strcmp(kFormats[number]->name, format.name)) ++number;
  return number;
}

static_assert(kBf16.token_bytes() == 1152 && kFp16.token_bytes() == 1152 && kBf16_512.token_bytes() == 1024);
static_assert(kFp8DsMla.token_bytes() == 656 && kFp8DsMla.rope_offset() == 528, "512 e4m3, 4 fp32 scales, 64 bf16");
static_assert(kFp8Model1.row_bytes() == 576 && kFp8Model1.token_bytes() == 584 && kFp8Model1.head_dim() == 512);
static_assert(kNvfp4.rope_offset() == 256 && kNvfp4.scale_offset() == 320 && kNvfp4.token_bytes() == 352);
static_assert(kStaged.row_bytes() == 1152 && kStaged.token_bytes() == 1153);
static_assert(kFp8_528.token_bytes() == 528 && kFp8Tensor576.token_bytes() == 576 &&
              kFp8Tensor512.token_bytes() == 512);

}  // namespace mla
