// What a GPU is to do, as the host decides it: compiled by plans.py.
#include "cpu/plan/plan.cpp"
#include "mla/schedule/cost.h"

// A GPU's plan, walked by the CPU.
extern "C" void gpu_plan(int32_t tokens, int32_t topk, int32_t extra_topk, const int32_t* length,
                         const int32_t* extra_length, bool batch_invariant, mla::PlanEntry* entries,
                         const mla::Launch* launch) {
  const mla::PlanProblem p{tokens, topk, extra_topk, length, extra_length, batch_invariant, entries, *launch};
  mla::cpu::fill_plan(mla::plan_shape(mla::PlanFor::gpu, p), entries, launch->ctas);
}

extern "C" void gpu_launch(const mla::Gpu* gpu, int64_t tokens, int64_t slots, int32_t heads, int32_t format,
                           bool batch_invariant, mla::Products products, mla::Launch* launch) {
  const int64_t tiles = slots < 0 ? mla::kAny : mla::ceil_div(slots, mla::kGpuTileSlots);
  *launch = mla::choose_launch({tokens, tiles, heads, *mla::kFormats[format], batch_invariant, products}, *gpu);
}
