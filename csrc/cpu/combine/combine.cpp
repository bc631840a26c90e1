#include "cpu/common/parallel.h"
#include "mla/limits.h"
#include "mla/number.h"
#include "mla/ops.h"
#include "mla/softmax.h"

namespace mla::cpu {
namespace {
#include "cpu/combine/combine_rows.h"

void narrow(float x, float* to) { *to = x; }
void narrow(float x, uint16_t* to) { *to = float_to_bf16(x); }

template <typename Value>
void combine(const CombineProblem<Value>& p) {
  for_each_in_ranges(p.tokens * p.heads, 8, [&](int64_t item) {
    const int64_t token = item / p.heads, head = item % p.heads;
    float sum[kMaxCombineDim];
    *p.lse.at(token, head) =
        combine_rows(p.partials, p.dim, p.outs + token * p.outs_token + head * p.outs_head, p.outs_partial,
                     p.lses + token * p.lses_token + head * p.lses_head, p.lses_partial, sum);
    Value* out = p.out.at(token, head);
    for (int32_t d = 0; d < p.dim; ++d) narrow(sum[d], out + d);
  });
}

}  // namespace

void combine_partials(const CombineProblem<float>& p) { combine(p); }
void combine_partials(const CombineProblem<uint16_t>& p) { combine(p); }

}  // namespace mla::cpu
