// Which kernel computes the backward on a GPU: chosen here and nowhere else.
#include "cuda/common/launch.h"
#include "cuda/ops.h"
#include "mla/choice.h"

namespace mla::cuda {

int32_t backward_group_heads(int device) {
  return describe_device(device).hopper_kernels ? kHopperGroupHeads : kPortableGroupHeads;
}

void sparse_backward(const BackwardProblem& p, void* stream) {
#ifdef MLA_CUDA_SM90A
  int index;
  check(cudaGetDevice(&index), "sparse_backward");
  const Device device = describe_device(index);
  if (device.hopper_kernels && !p.accumulator) return hopper_backward(p, device.processors, stream);
#endif
  portable_backward(p, stream);
}

}  // namespace mla::cuda
