// Any CPU: four lanes are SSE2 on x86-64 and NEON on Arm; arithmetic in fp32.
#include <cstdint>

#include "cpu/index/index.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 4;
constexpr int kFp32Sums = 8;
#include "cpu/common/simd.h"
#include "cpu/index/kernel.h"
}  // namespace

const IndexKernel kPortableIndexKernel{sizeof(Workspace), score<Fp32Arithmetic>};

}  // namespace mla::cpu
