// Sparse attention for 33 heads and more, and up to 2048 slots, with FP8 rows on Hopper, where both products are e4m3
// times e4m3. Queries and weights are rounded to e4m3; cached rows are multiplied as they are, and are never converted.
//
//   scores  S [64 heads x 64 tokens] = Q [64 x 512] K^T, rope in bf16
//   values  O^T [512 dims x 64 heads] += V^T [512 x 64] P^T
//
// FP8 operands have to run along the sum. K does. V runs across it, so V^T comes from registers: ldmatrix transposes
// pairs of bytes, prmt sorts them. Tokens and dims then have an order of their own, which P and the output follow.
//
// Two consumer warpgroups score every other tile each; a row of scores lies in four lanes, so the softmax needs no
// barrier. Each adds the values of all tiles for 256 dims. Four warps load rows.
//
//   load      | rows of i + 4 ...
//   group 0   | scores i | values i - 1 | softmax i | values i | scores i + 2 ...
//   group 1   | values i - 1 ...        | scores i + 1 |  values i | softmax i + 1 | values i + 1 ...
//
// With fp8_ds_mla rows each group of 128 dims has P of its own: times the tokens' scales.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/m64_fp8/config.h"
#include "cuda/attention/sm90/quantised_queries.cuh"
#include "cuda/attention/sm90/results.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::m64_fp8 {

constexpr int kTokenBarrier = 1;  // named barrier of both consumer warpgroups

// A weight at the row max is 2^kTop. Weights may be 2^kSlack times as large before the row max is raised: e4m3 has
// numbers up to 448.
constexpr float kTop = 6.0f, kSlack = 2.5f;

// Rounds a head's queries to e4m3, once.
template <bool kRopeToo>
struct RoundedQueries {
  uint4 latent[2], rope;

  __device__ void load(const AttentionProblem& p, int64_t token, int head, int lane) {
    load_head(latent, rope, p, token, head, lane);
  }

  template <typename Rows>
  __device__ void store(float scale, Rows (&q)[kGroups], Rows& q_rope, float* q_scale, int row, int lane) const {
    const HeadPower<kRopeToo> power(latent, rope);
    const float factor = power.factor();
#pragma unroll
    for (int j = 0; j < 2; ++j) store_bytes(q[lane / 16 + 2 * j], row, lane % 16, latent[j], factor);
    if (lane < 8) {
      if (kRopeToo)
        store_bytes(q_rope, row, lane, rope, factor);
      else
        store_piece(q_rope.address(row, lane), scaled_piece(rope, factor, false));
    }
    if (lane == 0) q_scale[row] = power.q_scale(scale);
  }

 private:
  // Stores numbers 8 * eighth to 8 * eighth + 7 of a row.
  template <typename Rows>
  static __device__ void store_bytes(Rows& rows, int row, int eighth, const uint4& numbers, float factor) {
    const auto four = [factor](uint32_t first, uint32_t second) {
      const auto two = [factor](uint32_t pair) -> uint32_t {
        return to_e4m3x2(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor);
      };
      return two(first) | two(second) << 16;
    };
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(rows.address(row, eighth / 2) + eighth % 2 * 8),
                 "r"(four(numbers.x, numbers.y)), "r"(four(numbers.z, numbers.w))
                 : "memory");
  }
};

template <Rows kRows, Form kForm>
struct Consumer {
  using Memory = Shared<kRows>;
  static constexpr bool kScaled = Memory::kScaled;
  static constexpr bool kMaxLogits = kForm == Form::sparse_max_logits;
  static constexpr int kScores = 32;  // per lane, of 64 x 64
  static constexpr int kBlocks = 4;   // of 64 dims, of a warpgroup's half of the output
  static constexpr int kSteps = kTileTokens / 32;
  using ScoreAtom = E4m3Atom<64>;
  using RopeAtom = Bf16Atom<64, Major::K, Major::K>;
  using ValueAtom = gmma::MMA_64x64x32_F32E4M3E4M3_RS_TN<>;

  const AttentionProblem& p;
  Memory& s;
  const int head_begin;
  const int group, warp, lane;  // warp of the warpgroup

  // Of block b: dims 64 * b + 16 * warp + 2 * (lane / 4) + i / 2 % 2, heads 8 * (i / 4) + 2 * (lane % 4) + i % 2.
  float out[kBlocks][kScores];
  // Of heads 16 * warp + lane / 4 and that plus 8, in this warpgroup's tiles.
  float row_max[2], total[2];
  float max_score[2];  // takes no registers unless kMaxLogits

  static __device__ constexpr int half(int i) { return i / 2 % 2; }  // 0: the lane's first head, 1: the second
  __device__ int head(int half) const { return warp * 16 + lane / 4 + 8 * half; }

  // ---- scores ----

  // Of group g; `add` to what the accumulators hold.
  __device__ static void multiply_group(float (&acc)[kScores], uint64_t q, uint64_t k, int g, bool add) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma<ScoreAtom>(acc, q + ((g * kHeads * kRowBytes + step * 32) >> 4),
                       k + ((g * kTileTokens * kRowBytes + step * 32) >> 4), add || step > 0);
  }

  // Begins the product of a tile's rope, and of all groups if they need no scales.
  __device__ void begin_scores(float (&score)[kScores], uint64_t q, uint64_t k) {
    constexpr int kRope = kGroups;  // the tile that follows those of the groups
    const uint64_t q_rope = q + ((kRope * kHeads * kRowBytes) >> 4),
                   k_rope = k + ((kRope * kTileTokens * kRowBytes) >> 4);
    cute::warpgroup_arrive();
    if constexpr (kScaled) {
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma<RopeAtom>(score, q_rope + ((step * 32) >> 4), k_rope + ((step * 32) >> 4), step > 0);
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) multiply_group(score, q, k, g, g > 0);
#pragma unroll
      for (int step = 0; step < 2; ++step)
        wgmma<ScoreAtom>(score, q_rope + ((step * 32) >> 4), k_rope + ((step * 32) >> 4));
    }
    cute::warpgroup_commit_batch();
  }

  // Waits for these products, and multiplies groups with scales one after the other. Scores are to base 2. The lane has
  // those of its heads and tokens 8 * j + 2 * (lane % 4) and the next.
  __device__ void end_scores(float (&score)[kScores], uint64_t q, uint64_t k, int stage) {
    cute::warpgroup_wait<0>();
    fence_acc(score);
    if constexpr (kScaled) {
      float part[kScores];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        cute::warpgroup_arrive();
        multiply_group(part, q, k, g, false);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        fence_acc(part);
#pragma unroll
        for (int j = 0; j < kScores / 4; ++j) {
          const float2 by = *reinterpret_cast<const float2*>(s.scale[stage][g / 2][4 * j + lane % 4][g % 2]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            score[4 * j + 2 * h] = fmaf(part[4 * j + 2 * h], by.x, score[4 * j + 2 * h]);
            score[4 * j + 2 * h + 1] = fmaf(part[4 * j + 2 * h + 1], by.y, score[4 * j + 2 * h + 1]);
          }
        }
      }
    }
    const float by[2] = {s.q_scale[head(0)], s.q_scale[head(1)]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) score[i] *= by[half(i)];
  }

  __device__ uint64_t q_descriptor() { return smem_descriptor(s.q[0].address()); }
  __device__ uint64_t k_descriptor(int stage) { return smem_descriptor(s.stages[stage].fp8[0].address()); }

  __device__ bool all_valid(int stage) const {
    return __all_sync(~0u, reinterpret_cast<const uint16_t*>(s.valid[stage])[lane] == 0x0101);
  }

  // Hides slots without a row.
  __device__ void hide_slots(float (&score)[kScores], int stage) const {
    if (all_valid(stage)) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i)
      if (!s.valid[stage][i / 4 * 8 + 2 * (lane % 4) + i % 2]) score[i] = -INFINITY;
  }

  // ---- softmax ----

  // Finds what a weight's scales add to a score, to base 2: the powers of two above the tokens' largest scales. Each
  // warp keeps them for itself.
  __device__ void find_lifts(int stage) {
    if constexpr (kScaled) {
      float most[2] = {0x1p-60f, 0x1p-60f};  // not less, so that P stays finite
#pragma unroll
      for (int i = 0; i < kGroups / 2; ++i) {
        const float4 own = *reinterpret_cast<const float4*>(s.scale[stage][i][lane]);
        most[0] = fmaxf(most[0], fmaxf(fabsf(own.x), fabsf(own.z)));
        most[1] = fmaxf(most[1], fmaxf(fabsf(own.y), fabsf(own.w)));
      }
      *reinterpret_cast<float2*>(&s.lift[group][warp][2 * lane]) = {static_cast<float>(power_above(most[0])),
                                                                    static_cast<float>(power_above(most[1]))};
      __syncwarp();
    }
  }

  // The largest score so far with its lift becomes the row max, if the weights would outgrow e4m3 otherwise. The row
  // max of the tile before is the other warpgroup's. `by` becomes the factor of the accumulators so far. Returns
  // whether it matters to any of the warp's heads.
  __device__ bool raise_row_max(const float (&score)[kScores], bool first, float (&by)[2]) {
    float top[2] = {kLowest, kLowest};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      float2 lift;
      if constexpr (kScaled) lift = *reinterpret_cast<const float2*>(&s.lift[group][warp][8 * j + 2 * (lane % 4)]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float first_score = score[4 * j + 2 * h], second = score[4 * j + 2 * h + 1];
        if constexpr (kScaled) first_score += lift.x, second += lift.y;
        top[h] = fmaxf(top[h], fmaxf(first_score, second));
      }
    }
    bool raises = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
      const float before = first ? kLowest : s.row_max[head(h)];
      const float raised = top[h] > before + kSlack ? top[h] : before;
      raises |= raised != before;
      by[h] = exp2_approximate(before - raised);
      if (row_max[h] != raised) total[h] *= exp2_approximate(row_max[h] - raised), row_max[h] = raised;
    }
    return __any_sync(~0u, raises) && !first;
  }

  static __device__ uint32_t pack(float a, float b, float c, float d) {
    return to_e4m3x2(a, b) | static_cast<uint32_t>(to_e4m3x2(c, d)) << 16;
  }

  // A tile's weights, rounded to e4m3: words of four tokens. [half][16 tokens][group].
  static constexpr int kVersions = kScaled ? kGroups : 1;
  using Words = uint32_t[2][4][kVersions];

  __device__ void find_weights(const float (&score)[kScores], Words& words, int stage) {
    const float shift[2] = {kTop - row_max[0], kTop - row_max[1]};
#pragma unroll
    for (int sixteen = 0; sixteen < 4; ++sixteen) {
      float prob[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          prob[h][i] = exp2_approximate(score[4 * (2 * sixteen + i / 2) + 2 * h + i % 2] + shift[h]);
          total[h] += prob[h][i];
        }
      if constexpr (kScaled) {
#pragma unroll
        for (int i = 0; i < kGroups / 2; ++i) {
          const float4 a = *reinterpret_cast<const float4*>(s.scale[stage][i][8 * sixteen + lane % 4]),
                       b = *reinterpret_cast<const float4*>(s.scale[stage][i][8 * sixteen + 4 + lane % 4]);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            words[h][sixteen][2 * i] = pack(prob[h][0] * a.x, prob[h][1] * a.y, prob[h][2] * b.x, prob[h][3] * b.y);
            words[h][sixteen][2 * i + 1] = pack(prob[h][0] * a.z, prob[h][1] * a.w, prob[h][2] * b.z, prob[h][3] * b.w);
          }
        }
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) words[h][sixteen][0] = pack(prob[h][0], prob[h][1], prob[h][2], prob[h][3]);
      }
    }
  }

  // Row maxima and weights of a tile, before anybody is told.
  __device__ void softmax(float (&score)[kScores], Words& words, float (&by)[2], bool& raises, int stage, bool first) {
    if constexpr (kMaxLogits)
#pragma unroll
      for (int i = 0; i < kScores; ++i) max_score[half(i)] = fmaxf(max_score[half(i)], score[i]);
    raises = raise_row_max(score, first, by);
    find_weights(score, words, stage);
  }

  // Stores them for both warpgroups, once these have read the tile before.
  __device__ void publish(const Words& words, const float (&by)[2], bool raises, uint32_t tile) {
    wait(s.probs_empty, tile % 2 ^ 1);
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) s.row_max[head(h)] = row_max[h], s.rescale[head(h)] = by[h];
    }
    if (lane == 0) s.raised[warp] = raises;
    // of stmatrix: lane / 8 is a group, or 16 tokens where all groups have one P
    if constexpr (kScaled) {
      const uint32_t own = s.probs[0].address() + (lane / 16) * static_cast<uint32_t>(sizeof(s.probs[0])) +
                           (warp * 16 + lane % 8) * kRowBytes + offset_in_row(lane % 8, lane / 8 % 2 * 4);
#pragma unroll
      for (int sixteen = 0; sixteen < 4; ++sixteen)
#pragma unroll
        for (int h = 0; h < 2; ++h) store_tiles(other_piece(own, sixteen) + 8 * h * kRowBytes, words[h][sixteen]);
    } else {
      const uint32_t own = s.probs[0].address(warp * 16 + lane % 8, lane / 8);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_tiles(own + 8 * h * kRowBytes, {words[h][0][0], words[h][1][0], words[h][2][0], words[h][3][0]});
    }
    fence_async_shared();
    arrive_as_warp(s.probs_full);
  }

  // ---- values ----

  __device__ void rescale() {
    const uint4 raised = *reinterpret_cast<const uint4*>(s.raised);
    if (!(raised.x | raised.y | raised.z | raised.w)) return;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(s.rescale + 8 * j + 2 * (lane % 4));
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        out[b][4 * j] *= by.x, out[b][4 * j + 1] *= by.y;
        out[b][4 * j + 2] *= by.x, out[b][4 * j + 3] *= by.y;
      }
    }
  }

  // The lane's part of a block of V^T: 64 dims (the warp's 16 are its rows) by 32 tokens.
  __device__ static void load_block(uint32_t (&a)[4], uint32_t rows) {
    uint32_t pairs[4];
    load_tiles_transposed(pairs, rows);
    a[0] = __byte_perm(pairs[0], pairs[1], 0x6420), a[1] = __byte_perm(pairs[0], pairs[1], 0x7531);
    a[2] = __byte_perm(pairs[2], pairs[3], 0x6420), a[3] = __byte_perm(pairs[2], pairs[3], 0x7531);
  }

  using Values = uint32_t[kSteps][kBlocks][4];

  // The warpgroup's half of a tile, as operand A. The tile's stage is free then, as far as this warp is concerned.
  __device__ void load_values(Values& values, uint32_t tile) {
    const int stage = tile % kStages;
    // lane / 8 is one of four tiles of eight tokens, lane % 8 the token
    const uint32_t piece = (warp ^ lane % 8) * kPieceBytes;
    const uint32_t rows = s.stages[stage].fp8[2 * group].address() + lane * kRowBytes + piece;
    wait(s.full[stage], tile / kStages % 2);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        load_block(values[step][b], (rows ^ b % 2 * 64) + (b / 2 * kTileTokens + 32 * step) * kRowBytes);
    arrive_as_warp(s.empty[stage]);
  }

  // Begins the product with a tile's P, which is there. The values must not change until it is complete.
  __device__ void begin_values(Values& values) {
    const uint64_t probs = smem_descriptor(s.probs[kScaled ? group : 0].address());
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) fence_acc(out[b]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) hide(values[step][b][i]);  // or they are sorted between the products
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        wgmma<ValueAtom>(out[b], values[step][b], probs + (((kScaled ? b / 2 * 64 : 0) + step * 32) >> 4));
    cute::warpgroup_commit_batch();
  }

  template <int kUnderWay>
  __device__ void end_values() {
    cute::warpgroup_wait<kUnderWay>();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) fence_acc(out[b]);
    arrive_as_warp(s.probs_empty);
  }

  __device__ void wait_for_probs(uint32_t tile) {
    wait(s.probs_full, tile % 2);
    rescale();
  }

  // All of this, without anything beside it.
  __device__ void add_values(uint32_t tile) {
    Values values;
    load_values(values, tile);
    wait_for_probs(tile);
    begin_values(values);
    end_values<0>();
  }

  // ---- a token ----

  // Both warpgroups load its queries; the ones before have been read.
  __device__ void load_queries(int token) {
    constexpr int kAtOnce = 4, kOwn = kHeads / kConsumerWarps;
    const int first = (4 * group + warp) * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn; i += kAtOnce) {
      RoundedQueries<!kScaled> queries[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) queries[j].load(p, token, head_begin + first + i + j, lane);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) queries[j].store(p.scale, s.q, s.q_rope, s.q_scale, first + i + j, lane);
    }
    fence_async_shared();
    sync();
  }

  __device__ void sync() const { sync_named<32 * kConsumerWarps>(kTokenBarrier); }

  __device__ void run(const CtaWork& cta) {
    uint32_t tile = 0;
    for (int token = cta.token_begin; token < cta.token_end; ++token) {
      const TokenWork work = cta.work(token);
      const uint32_t begin = tile, end = tile + work.tile_end - work.tile_begin;
#pragma unroll
      for (int h = 0; h < 2; ++h) row_max[h] = max_score[h] = kLowest, total[h] = 0.0f;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kScores; ++i) out[b][i] = 0.0f;
      if (begin < end) load_queries(token);
      tile += tile % 2 != group;
      if (tile < end) {
        float score[kScores], by[2];
        bool raises;
        Words words;
        const int stage = tile % kStages;
        wait(s.full[stage], tile / kStages % 2);
        fence_async_shared();
        find_lifts(stage);
        const uint64_t q = q_descriptor(), k = k_descriptor(stage);
        begin_scores(score, q, k);
        end_scores(score, q, k, stage);
        hide_slots(score, stage);
        if (tile > begin) add_values(tile - 1);
        softmax(score, words, by, raises, stage, tile == begin);
        publish(words, by, raises, tile);
      }
      for (tile += 2; tile < end; tile += 2) {
        float score[kScores], by[2];
        bool raises;
        Words words;
        Values values;
        const int stage = tile % kStages;
        const uint64_t q = q_descriptor(), k = k_descriptor(stage);
        load_values(values, tile - 2);
        wait(s.full[stage], tile / kStages % 2);
        fence_async_shared();
        find_lifts(stage);
        wait_for_probs(tile - 2);
        begin_values(values);
        begin_scores(score, q, k);
        end_values<1>();
        Values others;
        if (!kScaled) load_values(others, tile - 1);
        end_scores(score, q, k, stage);
        if (kScaled) load_values(others, tile - 1);
        hide_slots(score, stage);
        wait_for_probs(tile - 1);
        begin_values(others);
        softmax(score, words, by, raises, stage, false);
        end_values<0>();
        publish(words, by, raises, tile);
      }
      if (begin + (begin % 2 != group) < end) add_values(tile - 2);
      if (begin < end && (end - 1) % 2 != group) add_values(end - 1);
      tile = end;
      finish(work, cta.partial(work));
    }
  }

  // ---- a token's results ----

  __device__ void finish(const TokenWork& work, int64_t partial) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        total[h] += __shfl_xor_sync(~0u, total[h], distance);
        if constexpr (kMaxLogits) max_score[h] = fmaxf(max_score[h], __shfl_xor_sync(~0u, max_score[h], distance));
      }
      if (lane % 4 == 0) {
        s.own_max[group][head(h)] = row_max[h], s.total[group][head(h)] = total[h];
        s.max_score[group][head(h)] = max_score[h];
      }
    }
    sync();
    const int own = threadIdx.x % (32 * kConsumerWarps);
    if (own < kHeads) {
      const float a = s.own_max[0][own], b = s.own_max[1][own], raised = fmaxf(a, b);
      constexpr float kDown = 1 / 64.0f;  // 2^-kTop
      const float sum = add_in_any_order(s.total[0][own] * exp2_approximate(a - raised),
                                         s.total[1][own] * exp2_approximate(b - raised));
      s.factor[own] = kDown * finish_head(p, work.token, head_begin + own, work.whole(), partial, kDown * sum, raised,
                                          fmaxf(s.max_score[0][own], s.max_score[1][own]));
    }
    sync();
    write(work, partial, hidden(lane));
  }

  // Eight lanes have 16 neighbouring dims of a head.
  __device__ void write(const TokenWork& work, int64_t partial, int lane) {
    const Partials partials(p.workspace, p.ctas, p.heads);
    const int dim = group * (kBlocks * 64) + warp * 16 + 2 * (lane / 4);
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int own = 8 * j + 2 * (lane % 4) + c, head = head_begin + own;
        if (head >= p.heads) continue;
        const float by = s.factor[own];
        if (work.whole()) {
          uint16_t* to = p.out + p.offset(p.out_strides, work.token, head) + dim;
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
            *reinterpret_cast<uint32_t*>(to + 64 * b) = pack_bf16(out[b][4 * j + c] * by, out[b][4 * j + 2 + c] * by);
        } else {
          float* to = partials.out + partials.row(partial, head) * kValueDim + dim;
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
            *reinterpret_cast<float2*>(to + 64 * b) = {out[b][4 * j + c] * by, out[b][4 * j + 2 + c] * by};
        }
      }
  }
};

// Four warps load rows. A warp computes the addresses of its rows of two tiles at once, a lane a row.
template <Rows kRows>
struct Producer {
  static constexpr bool kScaled = is_scaled(kRows);
  static constexpr int kBatch = 32 / kWarpRows;  // tiles

  static __device__ void run(const AttentionProblem& p, Shared<kRows>& s, const CtaWork& cta, int warp, int lane) {
    const int first = warp * kWarpRows, at = first + lane % kWarpRows;
    TileCursor cursor(cta);
    cursor.advance(lane / kWarpRows);
    TileRequest<false> next(cursor, at, kBatch);
    uint32_t row = kNoRow;
    int batch = 0;  // 2 * token (as in TileRequest) + list
    for (int tile = 0;; ++tile) {
      if (tile % kBatch == 0) {
        row = next.row(p);
        batch = next.token * 2 + next.list;
        next = TileRequest<false>(cursor, at, kBatch);
      }
      const int first_lane = tile % kBatch * kWarpRows;
      const int both = __shfl_sync(~0u, batch, first_lane);
      if (both >> 1 == next.kEnd) return;
      const uint8_t* cache = p.lists[both & 1].cache.data;
      const uint32_t own = __shfl_sync(~0u, row, first_lane + lane % kWarpRows);
      const int stage = tile % kStages;
      wait(s.empty[stage], tile / kStages % 2 ^ 1);
      copy(s, stage, first, cache, own, lane);
      arrive_when_copied(s.full[stage]);
      arrive_as_warp(s.full[stage]);
    }
  }

  // Starts the copies of a warp's rows. `own` is where row lane % kWarpRows of them lies. The loop takes few
  // instructions a row: four warps have to ask for all rows.
  static __device__ void copy(Shared<kRows>& s, int stage, int first, const uint8_t* cache, uint32_t own, int lane) {
    const bool valid = own != kNoRow;
    if (lane < kWarpRows) s.valid[stage][first + lane] = valid;
    if (__all_sync(~0u, valid))
      copy_rows<true>(s, stage, first, cache, own, true, lane);
    else
      copy_rows<false>(s, stage, first, cache, valid ? own : 0, valid, lane);
  }

  template <bool kAllValid>
  static __device__ void copy_rows(Shared<kRows>& s, int stage, int first, const uint8_t* cache, uint32_t own,
                                   bool valid, int lane) {
    const auto copy = [&](uint32_t to, uint64_t from, int row) {
      const uint64_t piece = from + uint64_t{__shfl_sync(~0u, own, row)} * kPieceBytes;
      copy_16_or_zero(to, reinterpret_cast<const uint8_t*>(piece), kAllValid || __shfl_sync(~0u, valid, row));
    };
    const uint32_t to = s.stages[stage].fp8[lane / 8].address() + first * kRowBytes + lane % 8 * kPieceBytes;
    auto from = reinterpret_cast<uint64_t>(cache + kPieceBytes * lane);
    hide(from);  // or the cache's address is added for every row
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) copy(rows_further(to, i), from, i);
    constexpr int kPieces = kScaled ? 8 : 4, kAtOnce = 32 / kPieces;  // of rope; rows
    constexpr int kOffset = kScaled ? kFp8DsMla.rope_offset() : kFp8Tensor576.rope_offset();
    const int piece = lane % kPieces;
    auto from_rope = reinterpret_cast<uint64_t>(cache + kOffset + kPieceBytes * piece);
    hide(from_rope);
#pragma unroll
    for (int i = 0; i < kWarpRows; i += kAtOnce) {
      const int row = i + lane / kPieces;
      copy(s.stages[stage].rope.address(first + row, piece), from_rope, row);
    }
    if constexpr (kScaled) {
      constexpr int kGroupsAtOnce = 32 / kWarpRows;
#pragma unroll
      for (int i = 0; i < kGroups; i += kGroupsAtOnce) {
        const int token = first + lane % kWarpRows, g = i + lane / kWarpRows;
        copy_4_or_zero(cast_smem_ptr_to_uint(&s.scale[stage][g / 2][token / 2][g % 2][token % 2]),
                       cache + kFp8DsMla.scale_offset() + 4 * g + uint64_t{own} * kPieceBytes, valid);
      }
    }
  }
};

// blockIdx.x: a group of heads, y: the plan's entry.
template <Rows kRows, Form kForm>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kRows>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      s.full[i].init((32 + kWarpArrivals) * kProducerWarps);
      s.empty[i].init(kConsumerWarps * kWarpArrivals);
    }
    s.probs_full.init(4 * kWarpArrivals), s.probs_empty.init(kConsumerWarps * kWarpArrivals);
    s.touched = touch(p);
  }
  __syncthreads();
  const int head_begin = blockIdx.x * kHeads;
  const int warp = warp_of_cta(), lane = threadIdx.x % 32;
  if (warp < kConsumerWarps) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    pdl_wait();
    pdl_launch_dependents();
    Consumer<kRows, kForm> consumer{p, s, head_begin, warp / 4, warp % 4, lane};
    consumer.run(CtaWork(p, blockIdx.y, kTileTokens));
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    pdl_wait();
    Producer<kRows>::run(p, s, CtaWork(p, blockIdx.y, kTileTokens), warp - kConsumerWarps, lane);
  }
}

}  // namespace mla::cuda::sm90::m64_fp8
