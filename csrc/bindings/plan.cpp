#include "bindings/cuda_launch.h"
#include "bindings/ops.h"
#include "cpu/ops.h"
#ifdef MLA_CUDA
#include "cuda/ops.h"
#endif

namespace mla::bindings {

void plan(OptionalTensor topk_length, OptionalTensor extra_topk_length, int64_t tokens, int64_t topk,
          int64_t extra_topk, bool batch_invariant, Tensor out) {
  const auto count = [](int64_t value, const char* name) {
    if (value < 0 || value > INT32_MAX) reject(name, "0 to 2147483647", std::to_string(value));
    return static_cast<int32_t>(value);
  };
  expect_output(out, "out", {ScalarType::Int}, {{"workers"}, 8}, out);
  if (out.size(0) == 0 || !out.is_contiguous()) reject("out", "contiguous and of one row or more", describe(out));
  const int32_t* length = optional_data<int32_t>(topk_length, "topk_length", ScalarType::Int, {{"T", tokens}}, out);
  const int32_t* extra_length =
      optional_data<int32_t>(extra_topk_length, "extra_topk_length", ScalarType::Int, {{"T", tokens}}, out);
  const auto shape = [&](auto plan_shape) {
    return plan_shape(count(tokens, "num_tokens"), count(topk, "topk"), count(extra_topk, "extra_topk"), length,
                      extra_length, batch_invariant);
  };
  auto* rows = reinterpret_cast<PlanRow*>(out.data_ptr());
  const int32_t workers = expect_int32(out.size(0), "out", "rows");
#ifdef MLA_CUDA
  if (out.is_cuda()) return cuda::make_plan(shape(cuda::plan_shape), rows, workers, CudaLaunch(out).stream());
#endif
  cpu::make_plan(shape(cpu::plan_shape), rows, workers);
}

}  // namespace mla::bindings
