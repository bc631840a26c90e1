// AVX-512 (F, BW, DQ, VL); arithmetic in fp32.
#include <cstdint>

#include "cpu/index/index.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
constexpr int kFp32Sums = 16;
#include "cpu/simd.h"
#include "cpu/index/kernel.h"

void score(const IndexScoresProblem& problem, const ScoreStretch& stretch, void* workspace) {
  Workspace& w = *static_cast<Workspace*>(workspace);
  problem.queries_fp32 ? score_with<Fp32Arithmetic, float>(problem, stretch, w)
                       : score_with<Fp32Arithmetic, uint16_t>(problem, stretch, w);
}
}  // namespace

const IndexKernel kAvx512IndexKernel{sizeof(Workspace), score};

}  // namespace mla::cpu
