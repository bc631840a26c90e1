// AVX2 and FMA; arithmetic in fp32.
#include <cstdint>

#include "cpu/attention/attention.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 8;
constexpr int kAccumulators = 12;  // of 16 registers; with 8 every sum would wait for its last product
#include "cpu/common/simd.h"
#include "cpu/combine/combine_rows.h"
#include "cpu/attention/isa_fp32.h"
#include "cpu/attention/kernel.h"
}  // namespace

const AttentionKernel kAvx2Kernel{"avx2", "AVX2 and FMA", true, sizeof(Workspace), run, combine};

}  // namespace mla::cpu
