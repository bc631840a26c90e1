// The plan on the GPU: one block, whatever the number of tokens. See mla/plan.h for what it computes; csrc/cpu/plan.cpp
// walks the same steps one after the other.
#include "cuda/common/launch.h"
#include "cuda/common/scan.cuh"
#include "cuda/ops.h"
#include "mla/plan.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 1024;

struct PlanProblem {
  PlanShape shape;
  PlanRow* rows;
  int32_t workers;
};

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanProblem p) {
  const PlanShape& shape = p.shape;
  __shared__ int64_t units_before[kThreads];  // before each thread's stretch of tokens
  __shared__ ScanSpace<int64_t> scan64;
  __shared__ ScanSpace<int32_t> scan32;
  const int thread = threadIdx.x;

  // Each thread adds up the units of a stretch of tokens.
  const int32_t stretch = (shape.tokens + kThreads - 1) / kThreads;
  const int32_t first_token = min(static_cast<int64_t>(stretch) * thread, static_cast<int64_t>(shape.tokens));
  const int32_t last_token = min(static_cast<int64_t>(stretch) * (thread + 1), static_cast<int64_t>(shape.tokens));
  int64_t own_units = 0;
  for (int32_t token = first_token; token < last_token; ++token) own_units += 1 + token_tiles(shape, token);
  int64_t units;
  units_before[thread] = exclusive_sum(own_units, units, scan64);
  __syncthreads();

  // Where worker `index` begins: its cut falls into some thread's stretch, and there into some token.
  const int64_t active = active_workers(shape, units, p.workers);
  const auto border = [&](int64_t index) -> PlanBorder {
    if (index == 0) return {0, 0};
    if (index >= active || shape.tokens == 0) return {shape.tokens, 0};
    const int64_t cut = cut_before(index, active, units);
    int low = 0, high = kThreads - 1;  // the last stretch that begins at or before the cut
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (units_before[middle] <= cut)
        low = middle;
      else
        high = middle - 1;
    }
    int64_t offset = cut - units_before[low];
    int32_t token = stretch * low;
    while (1 + token_tiles(shape, token) <= offset) offset -= 1 + token_tiles(shape, token++);
    return settle_border(shape, token, token_tiles(shape, token), offset);
  };

  // Rows in rounds of a block's threads; places and parts go on from one round to the next.
  __shared__ int32_t places_before_round, open_run_before_round;
  if (thread == 0) places_before_round = 0, open_run_before_round = 0;
  for (int32_t round = 0; round < p.workers; round += kThreads) {
    const int32_t worker = round + thread;
    const bool real = worker < p.workers;
    const PlanBorder begin = real ? border(worker) : PlanBorder{shape.tokens, 0};
    const PlanBorder end = real ? border(worker + 1) : PlanBorder{shape.tokens, 0};
    const PlanBorder before = worker > 0 && real ? border(worker - 1) : PlanBorder{0, 0};
    const bool passes_on = begin.tile > 0 && end.tile > 0 && begin.token == end.token;

    int32_t places;
    const int32_t place =
        exclusive_sum((begin.tile > 0) + (end.tile > 0) - static_cast<int32_t>(passes_on), places, scan32);
    // A part's number is its distance to the border where its token was first cut: the latest border that doesn't
    // continue the one before it.
    const bool starts_run = begin.tile > 0 && !(before.tile > 0 && before.token == begin.token);
    const int32_t run_start = inclusive_max(starts_run ? worker + 1 : 0, scan32);
    __syncthreads();
    if (real) {
      PlanRow row = row_between(shape, begin, end);
      row.place = places_before_round + place;
      const int32_t start = run_start > 0 ? run_start : open_run_before_round;
      if (begin.tile > 0) row.part = worker - (start - 1) + 1;
      p.rows[worker] = row;
    }
    __syncthreads();
    if (thread == 0) places_before_round += places;
    if (thread == kThreads - 1 && run_start > 0) open_run_before_round = run_start;
    __syncthreads();
  }

  // The last part of a cut token tells the first one how many there are.
  for (int32_t worker = thread; worker < p.workers; worker += kThreads) {
    const PlanRow row = p.rows[worker];
    if (row.tile_begin == 0 || row.token_begin == row.token_end) continue;
    const bool last = worker + 1 == p.workers || p.rows[worker + 1].part != row.part + 1;
    if (last) p.rows[worker - row.part].parts = row.part + 1;
  }
}

}  // namespace

void make_plan(const PlanShape& shape, PlanRow* rows, int32_t workers, void* stream) {
  launch(plan_kernel, 1, kThreads, 0, stream, "plan", PlanProblem{shape, rows, workers});
}

KernelList plan_kernels() {
  static const KernelEntry entries[] = {{"plan", reinterpret_cast<const void*>(plan_kernel), kThreads, 0}};
  return {entries, 1};
}

}  // namespace mla::cuda
