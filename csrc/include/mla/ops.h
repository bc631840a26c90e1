// Every op as a device implements it; the bindings call these. On a GPU they enqueue and return: no synchronisation,
// no allocation. `stream` is a cudaStream_t.
#pragma once

#include "mla/backward.h"
#include "mla/index.h"
#include "mla/mask.h"
#include "mla/plan.h"
#include "mla/problem.h"

namespace mla {

#define MLA_OP_ON_BOTH(op, Problem)      \
  namespace cpu {                        \
  void op(const Problem& problem);       \
  }                                      \
  namespace cuda {                       \
  void op(const Problem&, void* stream); \
  }

MLA_OP_ON_BOTH(make_plan, PlanProblem)
MLA_OP_ON_BOTH(combine_partials, CombineProblem<float>)
MLA_OP_ON_BOTH(combine_partials, CombineProblem<uint16_t>)
MLA_OP_ON_BOTH(cache_write, CacheWriteProblem)
MLA_OP_ON_BOTH(cache_gather, CacheGatherProblem)
MLA_OP_ON_BOTH(stage_rows, StageProblem)
MLA_OP_ON_BOTH(convert_indices, ConvertProblem)
MLA_OP_ON_BOTH(mask_lists, MaskListsProblem)
MLA_OP_ON_BOTH(rotate_queries, RotateQueriesProblem)
MLA_OP_ON_BOTH(write_mxfp4_keys, WriteKeysProblem)
MLA_OP_ON_BOTH(index_scores, IndexScoresProblem)
MLA_OP_ON_BOTH(select_top, SelectTopProblem)
MLA_OP_ON_BOTH(select_tokens, SelectTokensProblem)
MLA_OP_ON_BOTH(sparse_delta, DeltaProblem)
MLA_OP_ON_BOTH(backward_order, OrderProblem)
MLA_OP_ON_BOTH(sparse_backward, BackwardProblem)
MLA_OP_ON_BOTH(backward_sum, SumProblem)

#undef MLA_OP_ON_BOTH

// Also how a GPU runs it, with a plan and a workspace. On a CPU there is one kernel.
namespace cpu {
void attention(const AttentionProblem& problem, const Launch&);
// Bytes that select_tokens works in, from the problem's numbers of tokens, heads, positions and topk alone.
int64_t select_workspace_bytes(const SelectTokensProblem& problem);
}  // namespace cpu
namespace cuda {
void attention(const AttentionProblem& problem, const Launch& launch, void* stream);
// On this GPU, which need not be the current one.
int64_t select_workspace_bytes(const SelectTokensProblem& problem, int device);
}  // namespace cuda

}  // namespace mla
