// Which kernel computes the backward on a GPU: chosen here and nowhere else.
#include <algorithm>

#include "cuda/ops.h"
#include "mla/choice.h"

namespace mla::cuda {

int32_t backward_group_heads(int device) {
  return describe_device(device).hopper_kernels ? kHopperGroupHeads : kPortableGroupHeads;
}

void sparse_backward(const BackwardProblem& p, void* stream) {
#ifdef MLA_CUDA_SM90A
  constexpr int kFewHeads = 32, kBlockHeads = 64;  // of few_heads at most, and of each block of many_heads
  const Device device = describe_current_device();
  if (device.hopper_kernels) {
    const bool few = p.heads <= kFewHeads && !p.accumulator;  // that kernel makes no atomic additions
    const int items = few ? p.count : p.count * head_groups(p.heads, kBlockHeads);
    const int blocks = std::min(items, device.processors / 2 * 2);  // more than 64 heads take pairs
    return few ? few_heads_backward(p, blocks, stream) : many_heads_backward(p, blocks, stream);
  }
#endif
  portable_backward(p, stream);
}

}  // namespace mla::cuda
