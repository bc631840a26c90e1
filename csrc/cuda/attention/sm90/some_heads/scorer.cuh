// Scores and softmax, by one warpgroup. Scores are products of e4m3 numbers: rows as they are in the cache, and each
// query as the sum of two e4m3 numbers, which are two of the 64 rows of wgmma. The two lie in one lane's registers.
// Sums over 128 dims that share a scale are multiplied with it in fp32.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/query_codes.cuh"
#include "cuda/attention/sm90/results.cuh"
#include "cuda/attention/sm90/some_heads/config.h"
#include "cuda/attention/work.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::some_heads {

constexpr int kScorerBarrier = 1;

// kLargest: the largest scores are asked for.
template <bool kLargest>
struct Scorer {
  // A lane's, of a warp's 8 heads: those of head() and tokens 8 * j + 2 * (lane % 4) + c: score[2 * j + c].
  using Scores = float[16];
  // And of wgmma's rows: part[4 * j + c] and part[4 * j + 2 + c] belong to one head.
  using Parts = float[32];
  static constexpr int kColumns = kTileTokens / 8;

  const AttentionProblem& p;
  Shared& s;
  const int head_begin;
  const int warp, lane;

  float reference;  // weights are 2^(score - reference)
  float total;      // of the lane's columns
  float highest;
  // Of tokens 2 * lane and the next, as a pair of bf16: log2 of what the adders divide its values by, or -inf if the
  // slot is none.
  uint32_t bias;

  __device__ int head() const { return warp * kWarpHeads + lane / 4; }

  __device__ void begin_rope(Parts& part, int stage) {
    const uint64_t q = describe_atoms(shared_address(s.q_rope)), k = describe_atoms(shared_address(s.rope[stage]));
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply<Number::bf16, Rows::along_sum, Rows::along_sum>(part, q + ((step * 32) >> 4), k + ((step * 32) >> 4),
                                                               step > 0);
    end_products();
  }

  __device__ void begin_group(Parts& part, int stage, int group) {
    const uint64_t q = describe_atoms(shared_address(s.q[group])),
                   k = describe_atoms(shared_address(s.codes[stage][group]));
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_codes(part, q + ((step * 32) >> 4), k + ((step * 32) >> 4), step > 0);
    end_products();
  }

  // Rope and the first group of a tile, when its rows are there.
  __device__ void begin_tile(Parts& rope, Parts& group, int tile) {
    const int stage = tile % kStages;
    wait(s.full[stage], tile / kStages % 2);
    publish_to_wgmma();
    sums_change(rope), sums_change(group);
    begin_products();
    begin_rope(rope, stage);
    begin_group(group, stage, 0);
  }

  // The rest of its scores: three groups are under way together, and added in turn.
  __device__ void finish_scores(Scores& sum, Parts& even, Parts& odd, int stage) {
    wait_for_products();
    sums_change(even), sums_change(odd);
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[2 * j + c] = even[4 * j + c];  // the other row's is zero
    add_group(sum, odd, stage, 0);
    Parts last;
    sums_change(even), sums_change(odd), sums_change(last);
    begin_products();
    begin_group(even, stage, 1);
    begin_group(odd, stage, 2);
    begin_group(last, stage, 3);
    find_bias(stage);
    wait_for_products<2>();
    sums_change(even);
    add_group(sum, even, stage, 1);
    wait_for_products<1>();
    sums_change(odd);
    add_group(sum, odd, stage, 2);
    wait_for_products();
    sums_change(last);
    add_group(sum, last, stage, 3);
    arrive_as_warp(s.empty[stage]);
  }

  __device__ void add_group(Scores& sum, const Parts& part, int stage, int group) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(&s.scale[stage][group][8 * j + 2 * (lane % 4)]);
      sum[2 * j] += (part[4 * j] + part[4 * j + 2]) * scale.x;
      sum[2 * j + 1] += (part[4 * j + 1] + part[4 * j + 3]) * scale.y;
    }
  }

  // And the scales that the adders use, a group a warp.
  __device__ void find_bias(int stage) {
    float2 largest = {}, own = {};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float2 scale = *reinterpret_cast<const float2*>(&s.scale[stage][group][2 * lane]);
      largest = {fmaxf(largest.x, fabsf(scale.x)), fmaxf(largest.y, fabsf(scale.y))};
      if (group == warp) own = scale;
    }
    const int power[2] = {power_above(largest.x), power_above(largest.y)};
    s.value_scale[stage][warp][lane] =
        pack_f16(own.x * __uint_as_float((127 - power[0]) << 23), own.y * __uint_as_float((127 - power[1]) << 23));
    const uint16_t held = *reinterpret_cast<const uint16_t*>(&s.held[stage][2 * lane]);
    bias = pack_bf16(held & 0xff ? static_cast<float>(power[0]) : -INFINITY,
                     held >> 8 ? static_cast<float>(power[1]) : -INFINITY);
  }

  // Scores to base 2, with what the values lack. Returns what sums so far have to be multiplied with.
  __device__ float compare(Scores& score) {
    float top = kLowest;
    const float q_scale = s.q_scale[head()];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint32_t biases = biases_of(j);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float own_bias = bias_of(biases, c);
        float& own = score[2 * j + c];
        if (kLargest && own_bias > -INFINITY) highest = fmaxf(highest, own * q_scale);
        own = own * q_scale + own_bias;
        top = fmaxf(top, own);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float by = 1.0f;
    if (top > reference + kSlack) {
      by = exp2_approximate(reference - top);
      reference = top;
      total *= by;
    }
    return by;
  }

  // Scores become weights, in shared memory, when the adders are done with those before the last ones.
  __device__ void weigh(Scores& score, int handed) {
    const int at = handed % kWeights;
    const uint32_t to = shared_address(s.weights[at]) + (warp * kWarpHeads + lane % 8) * kRowBytes;
    wait(s.weights_empty[at], handed / kWeights % 2 ^ 1);
#pragma unroll
    for (int first = 0; first < kColumns; first += 4) {
      uint32_t weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = first + i;
        const uint32_t biases = biases_of(j);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& own = score[2 * j + c];
          own = exp2_approximate(own - reference);
          total += own * inverse_power(bias_of(biases, c));
        }
        weights[i] = pack_f16(score[2 * j], score[2 * j + 1]);
      }
      store_tiles(to + ((first + lane / 8) ^ lane % 8) * kPieceBytes, weights);
    }
  }

  // Of tokens 8 * j + 2 * (lane % 4) and the next.
  __device__ uint32_t biases_of(int j) const { return __shfl_sync(~0u, bias, 4 * j + lane % 4); }
  static __device__ float bias_of(uint32_t pair, int c) { return __uint_as_float(c ? pair & 0xffff0000u : pair << 16); }

  // 2^-power of a whole number between -60 and 60; anything finite for -inf.
  static __device__ float inverse_power(float power) {
    constexpr float kWholeNumbers = 12582912.0f;  // 1.5 * 2^23: a whole number added to it stands in the lowest bits
    return __uint_as_float((__float_as_uint(kWholeNumbers - power) << 23) + (127u << 23));
  }

  __device__ void hand_over(float by, int handed) {
    const int at = handed % kWeights;
    const bool raised = __any_sync(~0u, by != 1.0f);
    if (lane == 0) reinterpret_cast<uint8_t*>(&s.raised[at])[warp] = raised;
    hand_over_factor(by, at);
  }

  __device__ void hand_over_factor(float factor, int at) {
    if (lane % 4 == 0) s.rescale[at][head()] = factor;
    publish_to_wgmma();
    arrive_as_warp(s.weights_full[at]);
  }

  __device__ void run(const Worker& worker) {
    int tile = 0, handed = 0;
    for (int token = worker.token_begin; token < worker.token_end; ++token) {
      const TokenWork work = worker.work(token);
      const int end = tile + work.tile_end - work.tile_begin;
      reference = highest = kLowest, total = 0.0f;
      if (tile < end) {
        sync_named<32 * kWarps>(kScorerBarrier);  // nobody reads the queries before
        load_query_codes<kWarps, kHeads, 8, kQueryRows * kRowBytes, true>(
            p, s.q[0], s.q_rope, s.q_scale, token, head_begin, warp, lane,
            [](int head) { return head / 8 * 16 + head % 8; }, [] {});
        publish_to_wgmma();
        sync_named<32 * kWarps>(kScorerBarrier);
        Scores score;
        Parts even, odd;
        begin_tile(even, odd, tile);
        finish_scores(score, even, odd, tile % kStages);
        for (; tile + 1 < end; ++tile, ++handed) {
          begin_tile(even, odd, tile + 1);
          const float by = compare(score);
          weigh(score, handed);
          hand_over(by, handed);
          finish_scores(score, even, odd, (tile + 1) % kStages);
        }
        const float by = compare(score);
        weigh(score, handed);
        hand_over(by, handed);
        ++tile, ++handed;
      }
      finish(work, worker.place(work), handed++);
    }
  }

  __device__ void finish(const TokenWork& work, int64_t place, int handed) {
    float factor;
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      total += __shfl_xor_sync(~0u, total, distance);
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
    }
    if (lane % 4 == 0)
      factor = finish_head(p, work.token, head_begin + head(), work.whole(), place, total, reference, highest);
    wait(s.weights_empty[handed % kWeights], handed / kWeights % 2 ^ 1);
    hand_over_factor(factor, handed % kWeights);
  }
};

}  // namespace mla::cuda::sm90::some_heads
