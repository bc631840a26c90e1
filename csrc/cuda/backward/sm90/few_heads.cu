#include "cuda/backward/sm90/few_heads.cuh"

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::backward::few_heads;
using sm90::kBlockDims, sm90::backward::kThreads;

template <int kHeads, int kWidth>
constexpr auto kKernel = backward_kernel<kHeads, kWidth / kBlockDims>;
template <int kHeads, int kWidth>
constexpr int kSharedBytes = sizeof(Shared<kHeads, kWidth / kBlockDims>);

template <int kHeads, int kWidth>
void run(const BackwardProblem& p, int processors, void* stream) {
  launch_pdl(kKernel<kHeads, kWidth>, dim3(std::min(p.count, processors)), kThreads, kSharedBytes<kHeads, kWidth>,
             stream, "sparse_backward", p);
}

template <int kWidth>
void run(const BackwardProblem& p, int processors, void* stream) {
  if (p.heads <= 8) return run<8, kWidth>(p, processors, stream);
  if (p.heads <= 16) return run<16, kWidth>(p, processors, stream);
  if (p.heads <= 24) return run<24, kWidth>(p, processors, stream);
  run<32, kWidth>(p, processors, stream);
}

template <int kHeads, int kWidth>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(kKernel<kHeads, kWidth>), kThreads, kSharedBytes<kHeads, kWidth>};
}

}  // namespace

void few_heads_backward(const BackwardProblem& p, int processors, void* stream) {
  p.width == kHeadDim ? run<kHeadDim>(p, processors, stream) : run<kValueDim>(p, processors, stream);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      entry<8, kHeadDim>("sparse_backward sm90, 8 heads"),
      entry<16, kHeadDim>("sparse_backward sm90, 16 heads"),
      entry<24, kHeadDim>("sparse_backward sm90, 24 heads"),
      entry<32, kHeadDim>("sparse_backward sm90, 32 heads"),
      entry<8, kValueDim>("sparse_backward sm90, 8 heads, rows of 512"),
      entry<16, kValueDim>("sparse_backward sm90, 16 heads, rows of 512"),
      entry<24, kValueDim>("sparse_backward sm90, 24 heads, rows of 512"),
      entry<32, kValueDim>("sparse_backward sm90, 32 heads, rows of 512"),
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
