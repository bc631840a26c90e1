// Hands ranges of tokens and positions to the threads.
#include <algorithm>

#include "cpu/common/features.h"
#include "cpu/common/kept_buffer.h"
#include "cpu/common/parallel.h"
#include "cpu/index/index.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

constexpr int32_t kPositions = 512;      // of a range: scoring them takes 20 times as long as laying out the queries
constexpr int64_t kRangesPerThread = 4;  // which take them in turn, as they are not equally long

// How many tokens in a row share a range: the more, the less often a key is converted; but all threads need work.
int64_t tokens_together(const IndexScoresProblem& p, int64_t chunks) {
  int64_t together = kScoreTokens;
  while (together > 1 && (p.tokens + together - 1) / together * chunks < kRangesPerThread * thread_count())
    together /= 2;
  return together;
}

}  // namespace

void index_scores(const IndexScoresProblem& p) {
  const IndexKernel& kernel = *active_kernels().index;
  const int64_t chunks = (int64_t{p.positions} + kPositions - 1) / kPositions;
  const int64_t together = tokens_together(p, chunks);
  for_each((p.tokens + together - 1) / together * chunks, [&](int64_t item) {
    thread_local KeptBuffer buffer;
    const int64_t end = std::min(p.tokens, (item / chunks + 1) * together);
    const int32_t begin_position = static_cast<int32_t>(item % chunks) * kPositions;
    const int32_t end_position =
        static_cast<int32_t>(std::min<int64_t>(p.positions, int64_t{begin_position} + kPositions));
    for (int64_t token = item / chunks * together; token < end;) {
      ScoreRange range{
          token, 0, begin_position, begin_position, p.scores + token * p.score_token + begin_position, p.score_token};
      // neighbours of one request, and no further than the longest of them sees
      for (; token < end && p.request[token] == p.request[range.token]; ++token, ++range.tokens)
        range.end = std::max(range.end, std::min(end_position, p.length[token]));
      if (range.end > range.begin) kernel.score(p, range, buffer.get(kernel.workspace_bytes));
    }
  });
}

}  // namespace mla::cpu
