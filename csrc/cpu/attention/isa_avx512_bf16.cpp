// AVX-512 with bf16 dot products and byte permutes (VBMI): Zen 4 and later, Sapphire Rapids and later. Products
// of bf16 numbers are exact in fp32, and so is their conversion from e4m3.
#include <immintrin.h>

#include <cstdint>

#include "cpu/attention/attention.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
#include "cpu/common/simd.h"
#include "cpu/combine/combine_rows.h"

#include "cpu/common/e4m3_to_bf16.h"

#include "cpu/attention/isa_bf16.h"

using Isa = Bf16Isa;
#include "cpu/attention/kernel.h"
}  // namespace

const AttentionKernel kAvx512Bf16Kernel{
    "avx512_bf16", "AVX-512 F, BW, DQ, VL, BF16 and VBMI", false, sizeof(Workspace), run, combine};

}  // namespace mla::cpu
