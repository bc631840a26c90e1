// AVX2 and FMA; arithmetic in fp32.
#include <cstdint>

#include "cpu/backward/backward.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 8;
constexpr int kAccumulators = 8;
#include "cpu/common/simd.h"
#include "cpu/attention/isa_fp32.h"
#include "cpu/backward/kernel.h"
}  // namespace

const BackwardKernel kAvx2BackwardKernel{sizeof(Workspace), run, sum_row, dot};

}  // namespace mla::cpu
