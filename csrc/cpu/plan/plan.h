// The plan for attention on the CPU, which makes its own where it is given none.
#pragma once

#include "mla/plan.h"

namespace mla::cpu {

void fill_plan(const PlanShape& shape, PlanEntry* entries, int ctas);

// Whether a plan, which may be a caller's and stale, covers every tile of these lists once and in order.
bool plan_fits(const PlanShape& shape, const PlanEntry* entries, int ctas);

}  // namespace mla::cpu
