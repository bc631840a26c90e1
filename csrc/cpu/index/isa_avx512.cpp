// AVX-512 (F, BW, DQ, VL); arithmetic in fp32.
#include <cstdint>

#include "cpu/index/index.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
constexpr int kFp32Sums = 16;
#include "cpu/common/simd.h"
#include "cpu/index/kernel.h"
}  // namespace

const IndexKernel kAvx512IndexKernel{sizeof(Workspace), score<Fp32Arithmetic>};

}  // namespace mla::cpu
