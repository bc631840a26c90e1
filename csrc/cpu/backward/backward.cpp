// Hands queries, rows and lists to the threads. No result depends on how many there are.
#include "cpu/backward/backward.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/common/features.h"
#include "cpu/common/kept_buffer.h"
#include "cpu/common/parallel.h"
#include "mla/number.h"
#include "mla/ops.h"

namespace mla::cpu {

void sparse_backward(const BackwardProblem& p) {
  const BackwardKernel& kernel = *active_kernels().backward;
  for_each(p.count, [&](int64_t i) {
    thread_local KeptBuffer workspace;
    kernel.run(p, p.first + static_cast<int32_t>(i), workspace.get(kernel.workspace_bytes));
  });
}

void backward_sum(const SumProblem& p) {
  const BackwardKernel& kernel = *active_kernels().backward;
  for_each_in_ranges(p.rows, 64, [&](int64_t row) { kernel.sum_row(p, static_cast<int32_t>(row)); });
}

// A counting sort. Each thread counts and places the entries of a range of queries.
void backward_order(const OrderProblem& p) {
  constexpr int64_t kMostRanges = 16, kFewestPairs = 1 << 14;
  const int64_t pairs = int64_t{p.queries} * p.lists.topk, rows = p.lists.rows;
  const int64_t ranges =
      std::max<int64_t>(1, std::min({int64_t{thread_count()}, kMostRanges, pairs / kFewestPairs, int64_t{p.queries}}));
  std::vector<int32_t> counts(static_cast<size_t>(ranges * rows));
  const auto visit = [&](int64_t range, auto&& body) {
    const int64_t end = (range + 1) * p.queries / ranges;
    for (int64_t query = range * p.queries / ranges; query < end; ++query) {
      const int32_t* indices = p.lists.indices + query * p.lists.stride;
      const int32_t entries = p.lists.entries(query);
      for (int32_t entry = 0; entry < entries; ++entry)
        if (p.lists.names(indices[entry]))
          body(counts[range * rows + indices[entry]], static_cast<int32_t>(query * p.lists.topk + entry));
    }
  };
  for_each(ranges, [&](int64_t range) { visit(range, [](int32_t& count, int32_t) { ++count; }); });
  int32_t before = 0;
  for (int64_t row = 0; row < rows; ++row) {
    p.begin[row] = before;
    for (int64_t range = 0; range < ranges; ++range) {
      int32_t& count = counts[range * rows + row];
      const int32_t here = count;
      count = before;
      before += here;
    }
  }
  p.begin[rows] = before;
  for_each(ranges, [&](int64_t range) { visit(range, [&](int32_t& at, int32_t pair) { p.pairs[at++] = pair; }); });
}

void sparse_delta(const DeltaProblem& p) {
  const BackwardKernel& kernel = *active_kernels().backward;
  for_each_in_ranges(p.tokens * p.heads, 64, [&](int64_t i) {
    const int64_t token = i / p.heads, head = i % p.heads;
    const float dot = kernel.dot(p.out.at(token, head), p.d_out.at(token, head));
    finish_delta(p, token, static_cast<int32_t>(head), dot);
  });
}

}  // namespace mla::cpu
