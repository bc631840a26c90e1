// Which kernel computes the backward on a GPU: chosen here and nowhere else.
#include "cuda/ops.h"
#include "mla/choice.h"

namespace mla::cuda {

int32_t backward_group_heads(int device) {
  return describe_device(device).hopper_kernels ? kHopperGroupHeads : kPortableGroupHeads;
}

void sparse_backward(const BackwardProblem& p, void* stream) {
#ifdef MLA_CUDA_SM90A
  constexpr int kFewHeads = 32;  // few_heads' limit; it has no atomic mode
  const Device device = describe_current_device();
  if (device.hopper_kernels) {
    const bool few = p.heads <= kFewHeads && !p.accumulator;
    return few ? few_heads_backward(p, device.processors, stream) : many_heads_backward(p, device.processors, stream);
  }
#endif
  portable_backward(p, stream);
}

}  // namespace mla::cuda
