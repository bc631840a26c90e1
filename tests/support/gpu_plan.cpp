// A GPU's plan, walked by the CPU: compiled by plans.py.
#include "cpu/plan/plan.cpp"

extern "C" void gpu_plan(int32_t tokens, int32_t topk, int32_t extra_topk, const int32_t* length,
                         const int32_t* extra_length, bool whole_tokens, mla::PlanRow* rows, int32_t workers) {
  const mla::PlanProblem p{tokens, topk, extra_topk, length, extra_length, whole_tokens, rows, workers};
  mla::cpu::fill_plan(mla::plan_shape(mla::PlanFor::gpu, p), rows, workers);
}
