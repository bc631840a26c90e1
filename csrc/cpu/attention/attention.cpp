// Hands the plan's entries to the threads, and combines the tokens that the plan has split.
#include "cpu/attention/attention.h"

#include <algorithm>
#include <vector>

#include "cpu/common/features.h"
#include "cpu/common/kept_buffer.h"
#include "cpu/common/parallel.h"
#include "cpu/plan/plan.h"
#include "mla/limits.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

void* thread_workspace(const AttentionKernel& kernel) {
  thread_local KeptBuffer buffer;
  return buffer.get(kernel.workspace_bytes);
}

Partials kept_partials(int32_t ctas, int32_t heads) {
  thread_local KeptBuffer buffer;
  return Partials(static_cast<float*>(buffer.get(Partials::floats(ctas, heads) * sizeof(float))), ctas, heads);
}

struct Job {
  const AttentionProblem& problem;
  const AttentionKernel& kernel;
  Partials partials;
  int32_t first_head;  // of the heads in `partials`
  PlanShape shape;

  Partial at(int64_t partial, int32_t head) const {
    const int64_t row = partials.row(partial, head - first_head);
    return {partials.out + row * kValueDim, partials.lse + row, partials.max_logits + row, partials.heads};
  }

  // All tokens of one CTA, for some heads.
  void run_entry(const PlanEntry& entry, int32_t head_begin, int32_t heads) const {
    void* workspace = thread_workspace(kernel);
    for (int32_t token = entry.token_begin; token < entry.token_end; ++token) {
      const int32_t tiles = token_tiles(shape, token);
      const int32_t tile_begin = token == entry.token_begin ? entry.tile_begin : 0;
      const int32_t tile_end = token == entry.token_end - 1 ? entry.tile_end : tiles;
      TokenWork work{token, head_begin, heads, tile_begin, tile_end, shape.tile_slots, {}};
      if (tile_begin > 0)
        work.partial = at(entry.partial, head_begin);
      else if (tile_end < tiles)
        work.partial = at(begun_partial(entry), head_begin);
      kernel.run(problem, work, workspace);
    }
  }

  // Combines one head of the token that this CTA begins and others continue.
  void combine(const PlanEntry& entry, int32_t head) const {
    kernel.combine(problem, entry.token_end - 1, head, entry.splits, at(begun_partial(entry), head));
  }
};

PlanShape shape_of(const AttentionProblem& p) {
  const bool two = p.list_count > 1;
  return plan_shape(PlanFor::cpu, {p.tokens,
                                   p.lists[0].topk,
                                   two ? p.lists[1].topk : 0,
                                   p.lists[0].length,
                                   two ? p.lists[1].length : nullptr,
                                   p.whole_tokens,
                                   nullptr,
                                   {}});
}

// Heads [first_head, first_head + heads) of all tokens.
void attend(const AttentionProblem& p, const PlanShape& shape, int32_t first_head, int32_t heads) {
  // If the plan keeps fewer threads busy than there are (short lists, or tokens that must stay whole), each CTA's
  // heads are divided, too, though every share then converts the rows again.
  int32_t busy = 0;
  for (int32_t w = 0; w < p.ctas; ++w) busy += p.plan[w].token_end > p.plan[w].token_begin;
  constexpr int32_t kFewestHeads = 16;
  int32_t shares = (heads + kMaxWorkHeads - 1) / kMaxWorkHeads;
  if (busy > 0 && busy < thread_count())
    shares = std::max(shares, std::min((thread_count() + busy - 1) / busy, (heads + kFewestHeads - 1) / kFewestHeads));
  const int32_t share = ((heads + shares - 1) / shares + kFewestHeads - 1) / kFewestHeads * kFewestHeads;

  const Job job{p, attention_kernel(p.tile), kept_partials(p.ctas, heads), first_head, shape};
  for_each(static_cast<int64_t>(p.ctas) * shares, [&](int64_t item) {
    const int32_t begin = static_cast<int32_t>(item % shares) * share;
    if (begin < heads) job.run_entry(p.plan[item / shares], first_head + begin, std::min(share, heads - begin));
  });

  std::vector<int32_t> split;
  for (int32_t w = 0; w < p.ctas; ++w)
    if (p.plan[w].splits > 1) split.push_back(w);
  for_each_in_ranges(static_cast<int64_t>(split.size()) * heads, 32, [&](int64_t item) {
    job.combine(p.plan[split[item / heads]], first_head + static_cast<int32_t>(item % heads));
  });
}

}  // namespace

void attention(const AttentionProblem& given, const Launch&) {
  AttentionProblem p = given;
  PlanShape shape = shape_of(p);
  std::vector<PlanEntry> own_plan;
  if (p.plan) shape.tile_slots = std::max(p.plan[0].tile_slots, 1);
  if (!p.plan || !plan_fits(shape, p.plan, p.ctas)) {
    shape = shape_of(p);
    own_plan.resize(static_cast<size_t>(thread_count()) * kPlanCtasPerThread);
    fill_plan(shape, own_plan.data(), static_cast<int>(own_plan.size()));
    p.plan = own_plan.data(), p.ctas = static_cast<int32_t>(own_plan.size());
  }

  // The heads of a request's many queries come in turn, so that partial results need no more memory than a query's.
  for (int32_t head = 0; head < p.heads; head += kMaxHeads)
    attend(p, shape, head, std::min(p.heads - head, static_cast<int32_t>(kMaxHeads)));
}

}  // namespace mla::cpu
