// AVX2 and FMA; arithmetic in fp32.
#include <cstdint>

#include "cpu/index/index.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 8;
constexpr int kFp32Sums = 8;
#include "cpu/common/simd.h"
#include "cpu/index/kernel.h"
}  // namespace

const IndexKernel kAvx2IndexKernel{sizeof(Workspace), score<Fp32Arithmetic>};

}  // namespace mla::cpu
