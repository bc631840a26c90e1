// The end of a row of attention: sink, rounding to bf16, and the numbers beside it. Like simd.h this is included
// inside the anonymous namespace of whoever needs it.

inline void finish_row(const AttentionProblem& p, int token, int head, const float* sum, float factor, float lse, float max_logit) {
  // e^lse / (e^lse + e^sink); an empty row's sum is 0 and stays so
  if (p.sink && lse > -__builtin_inff()) factor /= 1.0f + __builtin_expf(p.sink[head] - lse);
  uint16_t* out = p.out + token * p.out_token + head * p.out_head;
  for (int d = 0; d < kValueDim; ++d) out[d] = float_to_bf16(sum[d] * factor);
  p.lse[token * p.lse_token + head * p.lse_head] = lse;
  if (p.max_logits) p.max_logits[token * p.max_token + head * p.max_head] = max_logit;
}
