// A token at a time: its attention heads, and then the indexer's.
#include "cpu/common/parallel.h"
#include "mla/ops.h"

namespace mla::cpu {
namespace {

constexpr int kPairs = kRope / 2;

struct Angles {
  float cosine[kPairs], sine[kPairs];

  Angles(const Rotations& rotations, int64_t position) {
    const int64_t row = rotation_of(rotations, position);
    for (int i = 0; i < kPairs; ++i) {
      cosine[i] = number_at(rotations.data, rotations.fp32, row + i);
      sine[i] = number_at(rotations.data, rotations.fp32, row + kPairs + i);
    }
  }
};

void rotate_first(float* x, const Angles& angles, bool interleaved) {
  for (int i = 0; i < kPairs; ++i)
    rotate(x[interleaved ? 2 * i : i], x[interleaved ? 2 * i + 1 : i + kPairs], angles.cosine[i], angles.sine[i]);
}

}  // namespace

void rotate_queries(const RotateQueriesProblem& p) {
  for_each_in_ranges(p.tokens, 4, [&](int64_t token) {
    const Angles angles{p.rotations, p.position[token]}, index_angles{p.index_rotations, p.position[token]};
    for (int32_t head = 0; head < p.heads; ++head) {
      const uint16_t* query = p.queries.at(token, head);
      uint16_t* out = p.out.at(token, head);
      float x[kRope];
      for (int i = 0; i < kRope; ++i) x[i] = bf16_to_float(query[i]);
      rotate_first(x, angles, true);
      for (int i = 0; i < kRope; ++i) out[i] = float_to_bf16(x[i]);
    }
    for (int32_t head = 0; head < p.index_heads; ++head) {
      const uint16_t* query = p.index_queries.at(token, head);
      uint8_t* out = p.index_out.at(token, head);
      float x[kIndexDim], amax = 0.0f;
      for (int i = 0; i < kIndexDim; ++i) x[i] = bf16_to_float(query[i]);
      rotate_first(x, index_angles, p.interleaved);
      for (float one : x) amax = __builtin_fabsf(one) > amax ? __builtin_fabsf(one) : amax;
      const float scale = group_scale(amax, true), inverse = inverse_of_power(scale);
      for (int i = 0; i < kIndexDim; ++i) out[i] = float_to_e4m3(x[i] * inverse);
      const float weight = number_at(p.weights, p.weights_fp32, token * p.weight_token + head);
      p.weights_out[token * p.weight_out_token + head] = weight * p.weight_scale * scale;
    }
  });
}

}  // namespace mla::cpu
