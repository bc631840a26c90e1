#include "cuda/backward/sm90/many_heads.cuh"

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

using namespace sm90::backward::many_heads;
using sm90::kBlockDims, sm90::backward::kThreads;

template <int kWidth, Emit kEmit>
constexpr auto kKernel = backward_kernel<kWidth / kBlockDims, kEmit>;
template <int kWidth>
constexpr int kSharedBytes = sizeof(Shared<kWidth / kBlockDims>);

template <int kWidth>
void run(const BackwardProblem& p, int processors, void* stream) {
  const auto start = [&](void (*kernel)(BackwardProblem), int cluster) {
    const int ctas = std::min(Item::count(p), processors / cluster * cluster);
    launch_pdl(kernel, dim3(ctas), kThreads, kSharedBytes<kWidth>, stream, "sparse_backward", p, dim3(cluster));
  };
  if (p.accumulator)
    start(kKernel<kWidth, Emit::atomic>, 1);
  else if (p.heads <= kHeads)
    start(kKernel<kWidth, Emit::rows>, 1);
  else
    start(kKernel<kWidth, Emit::shared>, 2);
}

template <int kWidth, Emit kEmit>
KernelEntry entry(const char* name) {
  return {name, reinterpret_cast<const void*>(kKernel<kWidth, kEmit>), kThreads, kSharedBytes<kWidth>};
}

}  // namespace

void many_heads_backward(const BackwardProblem& p, int processors, void* stream) {
  p.width == kHeadDim ? run<kHeadDim>(p, processors, stream) : run<kValueDim>(p, processors, stream);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      entry<kHeadDim, Emit::rows>("sparse_backward sm90, 64 heads"),
      entry<kHeadDim, Emit::shared>("sparse_backward sm90, 128 heads"),
      entry<kHeadDim, Emit::atomic>("sparse_backward sm90, atomic additions"),
      entry<kValueDim, Emit::rows>("sparse_backward sm90, rows of 512, 64 heads"),
      entry<kValueDim, Emit::shared>("sparse_backward sm90, rows of 512, 128 heads"),
      entry<kValueDim, Emit::atomic>("sparse_backward sm90, rows of 512, atomic additions")};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
