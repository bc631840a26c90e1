// Where torch would launch CUDA work: the tensor's device and the current stream there. The stream function lives
// in a part of torch that a CPU-only torch lacks; as a weak symbol it lets the same library load under both.
#pragma once

#ifdef MLA_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings/check.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) __attribute__((weak));

namespace mla::bindings {

// Makes the tensor's device the current one for as long as it lives.
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
#endif
