#include <algorithm>

#include "cuda/backward/sm90/many_heads.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::backward::many_heads;

constexpr int kBlocks576 = 9, kBlocks512 = 8;  // of 64 dims

template <int kBlocks>
void run(const BackwardProblem& p, int processors, void* stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(int64_t{p.count} * p.groups, processors));
  launch(backward_kernel<kBlocks>, dim3(blocks), kThreads, sizeof(Shared<kBlocks>), stream, "sparse_backward", p);
}

}  // namespace

void hopper_backward(const BackwardProblem& p, int processors, void* stream) {
  if (p.heads <= kHopperFewHeads && !p.accumulator) return hopper_few_heads_backward(p, processors, stream);
  p.width == kHeadDim ? run<kBlocks576>(p, processors, stream) : run<kBlocks512>(p, processors, stream);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"sparse_backward sm90, 64 heads", reinterpret_cast<const void*>(backward_kernel<kBlocks576>), kThreads,
       sizeof(Shared<kBlocks576>)},
      {"sparse_backward sm90, 64 heads, rows of 512", reinterpret_cast<const void*>(backward_kernel<kBlocks512>),
       kThreads, sizeof(Shared<kBlocks512>)}};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
