#include "cpu/common/parallel.h"
#include "mla/limits.h"
#include "mla/number.h"
#include "mla/ops.h"
#include "mla/softmax.h"

namespace mla::cpu {
namespace {
#include "cpu/merge/merge_rows.h"

void narrow(float x, float* to) { *to = x; }
void narrow(float x, uint16_t* to) { *to = float_to_bf16(x); }

template <typename Value>
void merge(const MergeProblem<Value>& p) {
  for_each_in_ranges(p.tokens * p.heads, 8, [&](int64_t item) {
    const int64_t token = item / p.heads, head = item % p.heads;
    float sum[kMaxMergeDim];
    p.lse[token * p.lse_token + head * p.lse_head] =
        merge_rows(p.parts, p.dim, p.part_out + token * p.part_out_token + head * p.part_out_head, p.part_out_part,
                   p.part_lse + token * p.part_lse_token + head * p.part_lse_head, p.part_lse_part, sum);
    Value* out = p.out + token * p.out_token + head * p.out_head;
    for (int32_t d = 0; d < p.dim; ++d) narrow(sum[d], out + d);
  });
}

}  // namespace

void merge_partials(const MergeProblem<float>& p) { merge(p); }
void merge_partials(const MergeProblem<uint16_t>& p) { merge(p); }

}  // namespace mla::cpu
