#include "bindings/ops.h"
#include "cpu/ops.h"

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
  const PlanShape shape = cpu::plan_shape(count(tokens, "tokens"), count(topk, "topk"), count(extra_topk, "extra_topk"), length,
                                          extra_length, batch_invariant);
  cpu::make_plan(shape, reinterpret_cast<PlanRow*>(table.data_ptr()), expect_int32(table.size(0), "table", "rows"));
}

}  // namespace mla::bindings
