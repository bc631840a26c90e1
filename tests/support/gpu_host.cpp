// What a GPU is to do, as the host decides it: compiled by plans.py.
#include "cpu/plan/plan.cpp"
#include "mla/choice.h"

// A GPU's plan, walked by the CPU.
extern "C" void gpu_plan(int32_t tokens, int32_t topk, int32_t extra_topk, const int32_t* length,
                         const int32_t* extra_length, bool whole_tokens, mla::PlanRow* rows, int32_t workers,
                         const mla::Device* device) {
  const mla::PlanProblem p{tokens, topk, extra_topk, length, extra_length, whole_tokens, rows, workers};
  mla::PlanShape shape = mla::plan_shape(mla::PlanFor::gpu, p);
  if (device) mla::set_kind(shape, *device, workers);
  mla::cpu::fill_plan(shape, rows, workers);
}

extern "C" void gpu_choice(const mla::Device* device, int64_t tokens, int32_t heads, int32_t format, bool whole_tokens,
                           bool suits_hopper_kernels, int32_t workers, int64_t token_tiles, int32_t* choice) {
  const mla::CacheFormat& rows = *mla::kFormats[format];
  const mla::Choice c =
      mla::choose({tokens, heads, rows, whole_tokens, suits_hopper_kernels, workers, token_tiles}, *device);
  const int32_t numbers[] = {c.kernel, c.heads_per_block, c.parts, c.workers, c.cluster};
  for (int i = 0; i < 5; ++i) choice[i] = numbers[i];
}
