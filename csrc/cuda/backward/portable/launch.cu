#include "cuda/backward/portable/kernel.cuh"
#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {

void portable_backward(const BackwardProblem& p, void* stream) {
  using namespace portable_backward_kernel;
  const auto ctas = static_cast<unsigned>(int64_t{p.count} * head_groups(p.heads, kHeads));
  launch(p.width == kHeadDim ? backward_kernel<kHeadDim> : backward_kernel<kValueDim>, dim3(ctas), kThreads,
         sizeof(Shared), stream, "sparse_backward", p);
}

MLA_KERNELS {
  using namespace portable_backward_kernel;
  static const KernelEntry entries[] = {
      {"sparse_backward portable", reinterpret_cast<const void*>(backward_kernel<kHeadDim>), kThreads, sizeof(Shared)},
      {"sparse_backward portable, rows of 512", reinterpret_cast<const void*>(backward_kernel<kValueDim>), kThreads,
       sizeof(Shared)}};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
