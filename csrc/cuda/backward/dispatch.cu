// Which kernel computes the backward on a GPU: chosen here and nowhere else.
#include "cuda/ops.h"

namespace mla::cuda {

int32_t backward_group_heads(int device) {
  return describe_gpu(device).hopper ? kHopperGroupHeads : kPortableGroupHeads;
}

void sparse_backward(const BackwardProblem& p, void* stream) {
#ifdef MLA_CUDA_SM90A
  constexpr int kFewHeads = 32;  // few_heads' limit; it has no atomic mode
  const Gpu gpu = describe_current_gpu();
  if (gpu.hopper) {
    const bool few = p.heads <= kFewHeads && !p.accumulator;
    return few ? few_heads_backward(p, gpu.multiprocessors, stream)
               : many_heads_backward(p, gpu.multiprocessors, stream);
  }
#endif
  portable_backward(p, stream);
}

}  // namespace mla::cuda
