// Any CPU: four lanes are SSE2 on x86-64 and NEON on Arm; arithmetic in fp32.
#include <cstdint>

#include "cpu/attention/attention.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 4;
constexpr int kAccumulators = 8;
#include "cpu/common/simd.h"
#include "cpu/combine/combine_rows.h"
#include "cpu/attention/isa_fp32.h"
#include "cpu/attention/kernel.h"
}  // namespace

const AttentionKernel kPortableKernel{"portable", "nothing", true, sizeof(Workspace), run, combine};

}  // namespace mla::cpu
