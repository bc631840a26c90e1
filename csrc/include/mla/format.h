// How a cached token is laid out in memory. This is the only description: the CPU and CUDA kernels are
// compiled from it, and Python reads it from the library (mla_backend/formats.py).
#pragma once

#include <cstdint>

#include "mla/platform.h"

namespace mla {

enum class Code : int32_t { bf16, e4m3 };          // how the latent values are stored
enum class Scale : int32_t { none, fp32, ue8m0 };  // what a group of latent values is multiplied with
enum class ScalePlace : int32_t { in_row, end_of_page };

// A token is `latent` values, then its scales (if they lie in the row), then `rope` bf16 values.
// Queries have latent + rope values; the first `value` of them are what attention sums up.
struct CacheFormat {
  const char* name;
  Code code;
  int32_t latent;
  int32_t rope;
  int32_t value;
  int32_t group;  // latent values that share a scale; 0 where there are none
  Scale scale;
  ScalePlace scale_place;
  int32_t scale_padding;  // bytes that follow a token's scales

  MLA_HOST_DEVICE constexpr int32_t head_dim() const { return latent + rope; }
  MLA_HOST_DEVICE constexpr int32_t scales() const { return group ? latent / group : 0; }
  MLA_HOST_DEVICE constexpr int32_t latent_bytes() const { return latent * (code == Code::bf16 ? 2 : 1); }
  MLA_HOST_DEVICE constexpr int32_t scale_bytes() const {
    return scale == Scale::none ? 0 : scales() * (scale == Scale::fp32 ? 4 : 1) + scale_padding;
  }
  MLA_HOST_DEVICE constexpr int32_t scale_offset() const { return latent_bytes(); }
  MLA_HOST_DEVICE constexpr int32_t rope_offset() const {
    return latent_bytes() + (scale_place == ScalePlace::in_row ? scale_bytes() : 0);
  }
  MLA_HOST_DEVICE constexpr int32_t row_bytes() const { return rope_offset() + rope * 2; }
  MLA_HOST_DEVICE constexpr int32_t token_bytes() const {
    return row_bytes() + (scale_place == ScalePlace::end_of_page ? scale_bytes() : 0);
  }
};

// What a query of the DeepSeek-V3.2 family multiplies with a row, and what comes out.
constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kHeadDim = kLatent + kRope;
constexpr int kValueDim = 512;

constexpr CacheFormat kBf16{"bf16", Code::bf16, kLatent, kRope, kValueDim, 0, Scale::none, ScalePlace::in_row, 0};
constexpr CacheFormat kFp8DsMla{"fp8_ds_mla", Code::e4m3,         kLatent, kRope, kValueDim, 128,
                                Scale::fp32,  ScalePlace::in_row, 0};

// Every format that the ops accept. Which one a cache tensor has follows from its dtype and its last dimension.
constexpr const CacheFormat* kFormats[] = {&kBf16, &kFp8DsMla};
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

static_assert(kBf16.token_bytes() == 1152, "512 + 64 bf16 values");
static_assert(kFp8DsMla.token_bytes() == 656 && kFp8DsMla.rope_offset() == 528, "512 e4m3, 4 fp32 scales, 64 bf16");
// The description also covers the power-of-two formats of later models, for which no kernel exists yet.
static_assert(CacheFormat{"", Code::e4m3, 448, 64, 512, 64, Scale::ue8m0, ScalePlace::end_of_page, 1}.token_bytes() ==
              584);
static_assert(CacheFormat{"", Code::e4m3, 512, 0, 512, 32, Scale::ue8m0, ScalePlace::in_row, 0}.token_bytes() == 528);

}  // namespace mla
