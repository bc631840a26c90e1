// Combines partial results over disjoint sets of slots by their lse, for one row of a head. Like simd.h this is
// included inside the anonymous namespace of whoever needs it.

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return bf16_to_float(x); }

// sum[0 .. dim) becomes the combined row; returns its lse. `out` and `lse` of split i lie i strides on. A split with an
// lse of -inf weighs nothing, whatever its row holds.
template <typename Value>
inline float combine_rows(int splits, int dim, const Value* out, int64_t out_stride, const float* lse,
                          int64_t lse_stride, float* sum) {
  float max_lse = -__builtin_inff();
  for (int i = 0; i < splits; ++i) max_lse = __builtin_fmaxf(max_lse, lse[i * lse_stride]);
  float total = 0.0f;
  for (int i = 0; i < splits; ++i) total += combine_weight(lse[i * lse_stride], max_lse);
  const float inverse = inverse_of(total);
  for (int d = 0; d < dim; ++d) sum[d] = 0.0f;
  for (int i = 0; i < splits; ++i) {
    const float weight = combine_weight(lse[i * lse_stride], max_lse) * inverse;
    if (weight == 0.0f) continue;
    const Value* row = out + i * out_stride;
    for (int d = 0; d < dim; ++d) sum[d] += weight * widen(row[d]);
  }
  return lse_of(max_lse, total);
}
