// What the ops of sparse attention's backward solve. Strides count elements.
//
// The gradient of a kv row is the sum of one contribution for each (query, entry) whose list names the row. The main
// kernel writes these contributions for a block of queries, and the ordered sum adds them up, block after block, always
// in the same order: by query, then entry, then group of heads. So the bits depend on neither the size of a block nor
// on which thread was first.
//
// For a query t, head h and a valid entry that names row j, with s = scale * (q . k_j):
//   P = 2^(s * log2(e) - lse2[t, h]);  dP = d_out . v_j;  dS = scale * P * (dP - delta[t, h])
//   d_q += dS * k_j;  the contribution is the sum over a group's heads of dS * q, plus P * d_out in the first 512 dims
#pragma once

#include <cmath>
#include <cstdint>

#include "mla/number.h"
#include "mla/problem.h"

namespace mla {

constexpr int kMaxBackwardHeads = 128;

// Heads whose contributions are added before they are written: of the CPU's kernels, and of each GPU kernel.
constexpr int kCpuGroupHeads = kMaxBackwardHeads, kPortableGroupHeads = 32, kHopperGroupHeads = 128;

MLA_HOST_DEVICE constexpr int32_t head_groups(int32_t heads, int32_t group_heads) {
  return (heads + group_heads - 1) / group_heads;
}
constexpr int kMaxGroups = head_groups(kMaxBackwardHeads, kPortableGroupHeads);

// The rows that each query attends to. An entry counts as often as it is listed; one below 0 or from `rows` on is
// skipped, and so is everything from a query's length on.
struct RowLists {
  const int32_t* indices;  // [queries, topk]
  int64_t stride;          // from one query's list to the next one's
  int32_t topk;
  const int32_t* length;  // [queries] or null: only the first n entries count; below 0 is 0, above topk is topk
  int32_t rows;           // of kv

  MLA_HOST_DEVICE int32_t entries(int64_t query) const {
    if (!length) return topk;
    const int32_t n = length[query];
    return n < 0 ? 0 : n > topk ? topk : n;
  }
  MLA_HOST_DEVICE bool names(int32_t row) const { return row >= 0 && row < rows; }
};

// The main kernel, for queries [first, first + count). On a GPU q, kv, d_out, d_q, contributions and their strides are
// multiples of 16 bytes.
struct BackwardProblem {
  int32_t first, count;
  int32_t heads;               // 1 to kMaxBackwardHeads
  int32_t width;               // of q and kv: 576, or 512 where values are whole rows
  RowLists lists;              // of all queries, not of this block alone
  float scale;                 // of scores
  HeadRows<const uint16_t> q;  // bf16 [queries, heads, width]
  const uint16_t* kv;          // bf16 [rows, width]. A row that no valid entry names may hold anything
  int64_t kv_row;
  HeadRows<const uint16_t> d_out;  // bf16 [queries, heads, 512]
  const float* lse2;               // [queries, heads], dense: what DeltaProblem writes; +inf where P is 0
  const float* delta;              // [queries, heads], dense

  HeadRows<uint16_t> d_q;  // bf16 [queries, heads, width]; the block's queries are written, zeros where a list is empty

  // Either a row for each (query, entry) of the block and group of heads,
  // contributions + (group * group_stride + (query - first) * topk + entry) * width; nothing for an invalid entry.
  uint16_t* contributions;  // bf16 [groups, group_stride, width]
  int64_t group_stride;     // rows, at least count * topk
  int32_t groups;           // head_groups(heads, ...) of the kernel
  // Or, where that is null, atomic additions to the rows' gradients: fast while they fit in L2, and of other bits each
  // time. On a GPU only.
  float* accumulator;  // fp32 [rows, width], dense

  MLA_HOST_DEVICE uint16_t* contribution(int32_t group, int32_t query, int32_t entry) const {
    return contributions + (group * group_stride + (query - first) * int64_t{lists.topk} + entry) * width;
  }
};

// What depends on the lists alone: the valid (query, entry) pairs, as query * topk + entry, by the row they name and
// then by rising number. Those of row r are pairs[begin[r]] to pairs[begin[r + 1] - 1].
struct OrderProblem {
  int32_t queries;
  RowLists lists;
  int32_t* begin;  // [rows + 1]
  int32_t* pairs;  // [queries * topk]; from begin[rows] on they mean nothing
  void* scratch;   // on a GPU: of order_scratch_bytes()
  int64_t scratch_bytes;
};

// Adds the contributions of pairs [first_pair, first_pair + pair_count) to the rows' gradients, one by one in order.
// Blocks follow one another from pair 0 on, without gaps.
struct SumProblem {
  int32_t rows, width;
  const int32_t* begin;  // as OrderProblem has them
  const int32_t* pairs;
  int64_t total_pairs;  // queries * topk
  int64_t first_pair, pair_count;
  const uint16_t* contributions;  // bf16 [groups, group_stride, width] of the block's pairs
  int64_t group_stride;
  int32_t groups;
  // [rows]: the first of a row's pairs that is not added yet; and fp32 [rows, width], dense. The first block sets
  // both; null where one block is all.
  int32_t* next;
  float* accumulator;
  bool continues;  // the accumulator has the sums of earlier lists, and the first block adds to them
  uint16_t* d_kv;  // bf16 [rows, width]; null until the last block
  int64_t d_kv_row;
};

// What the main kernel needs to know of a token and head besides its rows.
struct DeltaProblem {
  int64_t tokens;
  int32_t heads;
  HeadRows<const uint16_t> out;  // bf16 [tokens, heads, 512]
  HeadRows<const uint16_t> d_out;
  HeadRows<const float> lse;    // [tokens, heads], natural, without the sink; -inf or +inf where a list is empty
  HeadRows<const float> d_lse;  // [tokens, heads] or null
  const float* sink;            // [heads] or null
  float* delta;                 // [tokens, heads], dense: d_out . out, less what d_lse changes of it
  float* lse2;                  // [tokens, heads], dense: to base 2, with the sink; +inf where all weights are 0
  float* d_sink;                // [tokens, heads], dense, or null: each token's share of the sinks' gradient
};

// From d_out . out to all that the problem asks for.
MLA_HOST_DEVICE void finish_delta(const DeltaProblem& p, int64_t token, int32_t head, float dot) {
  const float lse = *p.lse.at(token, head);
  float total = lse == -INFINITY ? INFINITY : lse;
  if (p.sink && total < INFINITY) {
    const float larger = fmaxf(lse, p.sink[head]), smaller = fminf(lse, p.sink[head]);
    total = larger == INFINITY ? larger : larger + log1pf(expf(smaller - larger));
  }
  const int64_t at = token * p.heads + head;
  p.lse2[at] = total * kLog2E;
  p.delta[at] = dot;
  if (p.d_lse.data) {
    // lse is without the sink and P is with it: d_lse times P without the sink is d_lse * e^(total - lse) times P.
    // The bound keeps the product with a P of 0 finite.
    constexpr float kMostExponent = 69.0f;
    const float factor = p.sink ? expf(fminf(total - lse, kMostExponent)) : 1.0f;
    p.delta[at] -= *p.d_lse.at(token, head) * factor;
  }
  if (p.d_sink) {
    const float weight = total == INFINITY ? 1.0f : expf(p.sink[head] - total);
    p.d_sink[at] = dot == 0.0f ? 0.0f : -weight * dot;  // with nothing to attend to dot is 0
  }
}

}  // namespace mla
