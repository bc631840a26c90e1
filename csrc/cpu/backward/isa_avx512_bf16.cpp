// AVX-512 with bf16 dot products: P, dS and rows are bf16, sums are fp32.
#include <immintrin.h>

#include <cstdint>

#include "cpu/backward/backward.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
#include "cpu/common/simd.h"

#include "cpu/common/e4m3_to_bf16.h"

#include "cpu/attention/isa_bf16.h"

using Isa = Bf16Isa;
#include "cpu/backward/kernel.h"
}  // namespace

const BackwardKernel kAvx512Bf16BackwardKernel{sizeof(Workspace), run, sum_row, dot};

}  // namespace mla::cpu
