// AVX-512 (F, BW, DQ, VL); arithmetic in fp32.
#include <cstdint>

#include "cpu/backward/backward.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
constexpr int kAccumulators = 16;
#include "cpu/common/simd.h"
#include "cpu/attention/isa_fp32.h"
#include "cpu/backward/kernel.h"
}  // namespace

const BackwardKernel kAvx512BackwardKernel{sizeof(Workspace), run, sum_row, dot};

}  // namespace mla::cpu
