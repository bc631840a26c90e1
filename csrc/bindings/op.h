// How a binding becomes an op of torch, and how an op runs where its tensors are.
//
//   MLA_OP(cache_gather, Tensor cache, Tensor slots, Written out) {
//     ... check the arguments, make a problem p of plain pointers ...
//     MLA_RUN(cache, cache_gather, p);
//   }
//
// The op's schema follows from its parameters. Every op returns nothing and writes into tensors that the caller made:
// a captured graph allocates nothing, and one fake implementation (mla_backend/fake.py) serves all. The Python API
// makes the tensors that a caller leaves out.
#pragma once

#include "bindings/check.h"
#include "bindings/memory.h"
#include "mla/ops.h"

#define MLA_OP(op, ...)                                                                                               \
  void op(__VA_ARGS__);                                                                                               \
  static const Op op##_op{#op, #__VA_ARGS__};                                                                         \
  STABLE_TORCH_LIBRARY_FRAGMENT(mla_backend, m) { m.def(op##_op.schema.c_str()); }                                    \
  STABLE_TORCH_LIBRARY_IMPL(mla_backend, CPU, m) { m.impl(#op, TORCH_BOX((&WithMemoryChecked<&op, op##_op>::run))); } \
  MLA_IF_CUDA(STABLE_TORCH_LIBRARY_IMPL(mla_backend, CUDA, m) {                                                       \
    m.impl(#op, TORCH_BOX((&WithMemoryChecked<&op, op##_op>::run)));                                                  \
  })                                                                                                                  \
  void op(__VA_ARGS__)

// What mla_backend/library.py calls through ctypes.
#define MLA_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef MLA_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

// It lives in a part of torch that a CPU-only torch lacks; as a weak symbol it lets the same library load under both.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) __attribute__((weak));

namespace mla::bindings {

// Makes the tensor's device the current one for as long as it lives, and knows torch's stream there.
class CudaLaunch {
 public:
  explicit CudaLaunch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    if (!aoti_torch_get_current_cuda_stream ||
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_) != 0)
      throw std::runtime_error("mla_backend: torch gave no CUDA stream for a CUDA tensor");
  }
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace mla::bindings

#define MLA_IF_CUDA(...) __VA_ARGS__
#define MLA_RUN(tensor, op, ...) \
  (tensor).is_cuda() ? cuda::op(__VA_ARGS__, CudaLaunch(tensor).stream()) : cpu::op(__VA_ARGS__)
#else
#define MLA_IF_CUDA(...)
#define MLA_RUN(tensor, op, ...) cpu::op(__VA_ARGS__)
#endif
