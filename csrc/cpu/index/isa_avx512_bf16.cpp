// AVX-512 with bf16 dot products and byte permutes (VBMI): Zen 4 and later, Sapphire Rapids and later. For queries in
// bf16; those in fp32 are multiplied as fp32.
#include <immintrin.h>

#include <cstdint>

#include "cpu/index/index.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
constexpr int kFp32Sums = 16;
#include "cpu/common/simd.h"
#include "cpu/common/e4m3_to_bf16.h"
#include "cpu/index/kernel.h"

#include "cpu/index/bf16_arithmetic.h"
}  // namespace

const IndexKernel kAvx512Bf16IndexKernel{sizeof(Workspace), score<Bf16Arithmetic>};

}  // namespace mla::cpu
