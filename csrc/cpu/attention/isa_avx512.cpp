// AVX-512 (F, BW, DQ, VL); arithmetic in fp32.
#include <cstdint>

#include "cpu/attention/attention.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
constexpr int kAccumulators = 16;
#include "cpu/common/simd.h"
#include "cpu/combine/combine_rows.h"
#include "cpu/attention/isa_fp32.h"
#include "cpu/attention/kernel.h"
}  // namespace

const AttentionKernel kAvx512Kernel{"avx512", "AVX-512 F, BW, DQ and VL", true, sizeof(Workspace), run, combine};

}  // namespace mla::cpu
