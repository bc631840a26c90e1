#include "bindings/cuda_launch.h"
#include "bindings/ops.h"
#include "cpu/ops.h"
#ifdef MLA_CUDA
#include "cuda/ops.h"
#endif

namespace mla::bindings {

void plan(OptionalTensor topk_length, OptionalTensor extra_topk_length, int64_t tokens, int64_t topk, int64_t extra_topk,
          bool batch_invariant, Tensor table) {
  const auto count = [](int64_t value, const char* name) {
    if (value < 0 || value > INT32_MAX) reject(name, "0 to 2147483647", std::to_string(value));
    return static_cast<int32_t>(value);
  };
  expect(table, "table", {ScalarType::Int}, {{"workers"}, 8}, table);
  if (table.size(0) == 0 || !table.is_contiguous()) reject("table", "contiguous and of one row or more", describe(table));
  const int32_t* length = optional_data<int32_t>(topk_length, "topk_length", ScalarType::Int, {{"T", tokens}}, table);
  const int32_t* extra_length =
      optional_data<int32_t>(extra_topk_length, "extra_topk_length", ScalarType::Int, {{"T", tokens}}, table);
  const auto shape = [&](auto plan_shape) {
    return plan_shape(count(tokens, "tokens"), count(topk, "topk"), count(extra_topk, "extra_topk"), length, extra_length, batch_invariant);
  };
  auto* rows = reinterpret_cast<PlanRow*>(table.data_ptr());
  const int32_t workers = expect_int32(table.size(0), "table", "rows");
#ifdef MLA_CUDA
  if (table.is_cuda()) return cuda::make_plan(shape(cuda::plan_shape), rows, workers, CudaLaunch(table).stream());
#endif
  cpu::make_plan(shape(cpu::plan_shape), rows, workers);
}

}  // namespace mla::bindings
