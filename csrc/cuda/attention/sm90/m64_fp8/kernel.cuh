// Sparse attention for 33 heads and more, and up to 2048 slots, with FP8 rows on Hopper, where both products are e4m3
// times e4m3. Queries and weights are rounded to e4m3; cached rows are multiplied as they are, and are never converted.
//
//   scores  S^T [64 tokens x 64 heads] = K [64 x 576] Q^T; rope is bf16 in fp8_ds_mla rows
//   values  O^T [512 dims x 64 heads] += V^T [512 x 64] P^T
//
// Rows lie in shared memory as in the cache, brought there by one bulk copy each. Both products take them from there
// through registers, as operand A: K by ldmatrix, V^T by ldmatrix that transposes pairs of bytes, which prmt sorts. So
// they need no swizzle, and a token's scales are a lane's own.
//
// Two consumer warpgroups score every other tile each, and add the values of all tiles for 256 dims each. The shifts of
// a tile's weights depend on those of the tile before, but not on its P: they are decided as soon as scores are there,
// and both warpgroups find P at once. Four warps load rows.
//
//   load      | rows of i + 2 ...
//   group 0   | values i - 2 | scores i | shifts i | values i - 1 | P of i | values i ...
//   group 1   | P of i - 1 | values i - 1 | scores i + 1 | shifts i + 1 | values i | P of i + 1 ...
//
// With fp8_ds_mla rows each group of 128 dims has P of its own: times the tokens' scales.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/m64_fp8/config.h"
#include "cuda/attention/sm90/m64_fp8/queries.cuh"
#include "cuda/attention/sm90/results.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::m64_fp8 {

// Named barriers: of both consumer warpgroups; the first of those of one.
constexpr int kTokenBarrier = 1, kGroupBarrier = 2;

// A weight at the row max is 2^kTop. Weights may be 2^kSlack times as large before the row max is raised: e4m3 has
// numbers up to 448.
constexpr float kTop = 6.0f, kSlack = 2.75f;

template <Rows kRows, Form kForm>
struct Consumer {
  using Memory = Shared<kRows>;
  static constexpr bool kScaled = Memory::kScaled;
  static constexpr bool kMaxLogits = kForm == Form::sparse_max_logits;
  static constexpr int kScores = 32;  // per lane, of 64 x 64
  static constexpr int kPairs = 8;    // of heads per lane: 8 * j + 2 * (lane % 4) and the next
  static constexpr int kBlocks = 4;   // of 64 dims, of a warpgroup's half of the output
  static constexpr int kSteps = kTileTokens / 32;
  using Atom = gmma::MMA_64x64x32_F32E4M3E4M3_RS_TN<>;
  using RopeAtom = gmma::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::K>;

  const AttentionProblem& p;
  Memory& s;
  const int head_begin;
  const int group, warp, lane;  // warp of the warpgroup

  // Of block b: dims 64 * b + 16 * warp + 2 * (lane / 4) + i / 2 % 2, heads 8 * (i / 4) + 2 * (lane % 4) + i % 2.
  float out[kBlocks][kScores];
  // Of heads 8 * (lane / 4) + 2 * (lane % 4) and the next, and the warp's tokens.
  float total[2], shift[2];  // weights summed so far, and the shift that they have
  float max_score[2];        // takes no registers unless kMaxLogits

  // ---- scores ----
  // Of tokens 16 * warp + lane / 4 (half 0) and that plus 8 (half 1): score[4 * j + 2 * half + i] is that of head i of
  // pair j.

  using Operands = uint32_t[4][4];  // A of four products

  // The address of the lane's row of a tile, and there of its piece, as ldmatrix wants them for operand A.
  __device__ uint32_t own_rows(int stage) const {
    return s.stages[stage].address() + (16 * warp + lane % 16) * Memory::kPitch + lane / 16 * kPieceBytes;
  }

  // Loads 32 * steps bytes of the warp's rows.
  __device__ static void load_keys(Operands& keys, uint32_t rows, int steps = 4) {
#pragma unroll
    for (int step = 0; step < steps; ++step) load_tiles(keys[step], rows + 32 * step);
  }

  template <typename Multiply>
  __device__ static void multiply_keys(float (&acc)[kScores], Operands& keys, uint64_t q, int steps, bool add) {
#pragma unroll
    for (int step = 0; step < steps; ++step) wgmma<Multiply>(acc, keys[step], q + ((32 * step) >> 4), add || step > 0);
  }

  // Of a group's queries in descriptors; rope's follow those of the groups.
  __device__ static constexpr uint64_t q_offset(int group) { return (group * kHeads * kRowBytes) >> 4; }
  static_assert(offsetof(Memory, q_rope) == sizeof(Memory::q));

  // The first keys: those of rope if groups have scales.
  __device__ void load_first_keys(Operands& keys, int stage) const {
    load_keys(keys, own_rows(stage) + (kScaled ? Memory::kRopeOffset : 0));
  }

  __device__ void begin_scores(float (&score)[kScores], Operands& keys) {
    const uint64_t q = smem_descriptor(s.q[0].address());
    cute::warpgroup_arrive();
    if constexpr (kScaled)
      multiply_keys<RopeAtom>(score, keys, q + q_offset(kGroups), 4, false);
    else
      multiply_keys<Atom>(score, keys, q, 4, false);
    cute::warpgroup_commit_batch();
  }

  // Multiplies the others. With scales, one group after the other. What comes out is still to be multiplied by the
  // heads' q_scale.
  __device__ void end_scores(float (&score)[kScores], Operands& keys, int stage) {
    const uint64_t q = smem_descriptor(s.q[0].address());
    const uint32_t rows = own_rows(stage);
    if constexpr (kScaled) {
      cute::warpgroup_wait<0>();
      fence_acc(score);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float products[kScores];
        load_keys(keys, rows + g * kRowBytes);
        cute::warpgroup_arrive();
        multiply_keys<Atom>(products, keys, q + q_offset(g), 4, false);
        cute::warpgroup_commit_batch();
        float scale[2] = {scales<float>(stage, 0, g), scales<float>(stage, 1, g)};
        cute::warpgroup_fence_operand(scale[0]), cute::warpgroup_fence_operand(scale[1]);  // loaded here
        cute::warpgroup_wait<0>();
        fence_acc(products);
#pragma unroll
        for (int i = 0; i < kScores; ++i) score[i] = fmaf(products[i], scale[i / 2 % 2], score[i]);
        fence_acc(score);  // or this is put off, until registers run out
      }
    } else {
      Operands next;
#pragma unroll
      for (int g = 1; g <= kGroups; ++g) {  // the last is rope
        Operands& own = g % 2 ? next : keys;
        const int steps = g < kGroups ? 4 : 2;
        load_keys(own, rows + g * kRowBytes, steps);
        cute::warpgroup_arrive();
        multiply_keys<Atom>(score, own, q + q_offset(g), steps, true);
        cute::warpgroup_commit_batch();
        if (g < kGroups)
          cute::warpgroup_wait<1>();
        else
          cute::warpgroup_wait<0>();
      }
      fence_acc(score);
    }
  }

  __device__ int token(int half) const { return 16 * warp + lane / 4 + 8 * half; }

  template <typename Scales = float4>
  __device__ Scales scales(int stage, int half, int g = 0) const {
    return *reinterpret_cast<const Scales*>(s.stages[stage].rows[token(half)] + kFp8DsMla.scale_offset() + 4 * g);
  }
  static __device__ float of_group(const float4& scales, int g) {
    return g == 0 ? scales.x : g == 1 ? scales.y : g == 2 ? scales.z : scales.w;
  }

  // ---- softmax ----

  // Reduces of(pair), a number for each head of a pair, over the warp's tokens. The lane gets those of pair lane / 4.
  template <typename Of, typename Reduce>
  __device__ float2 over_tokens(Of of, Reduce reduce) const {
    const auto halve = [&](float2 low, float2 high, int distance) -> float2 {
      const bool upper = lane & distance;
      const float2 kept = upper ? high : low, given = upper ? low : high;
      return {reduce(kept.x, __shfl_xor_sync(~0u, given.x, distance)),
              reduce(kept.y, __shfl_xor_sync(~0u, given.y, distance))};
    };
    float2 four[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 low = of(j), high = of(j + 4);
      four[j] = halve(low, high, 16);
    }
    const float2 even = halve(four[0], four[2], 8), odd = halve(four[1], four[3], 8);
    return halve(even, odd, 4);
  }

  // {q_scale, shift} of head 0 and of head 1 of a pair.
  __device__ float4 heads(uint32_t version, int pair) const {
    return *reinterpret_cast<const float4*>(&s.heads[version][8 * pair + 2 * (lane % 4)]);
  }

  __device__ bool vote(bool own) const { return sync_named_or<128>(kGroupBarrier + group, own); }

  // What is to be known of the lane's two tokens before their scores.
  struct Tokens {
    bool valid[2], all_valid;
    // What a weight's scales add to its logarithm: that of the power of two above the largest. Not less than -100, so
    // that weights stay finite.
    float lift[2] = {};

    __device__ Tokens(const Consumer& c, int stage) {
      uint32_t flags[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        flags[half] = c.s.valid[stage][c.token(half)];
        if constexpr (kScaled) {
          const float4 own = c.scales(stage, half);
          const float most = fmaxf(fmaxf(fabsf(own.x), fabsf(own.y)), fmaxf(fabsf(own.z), fabsf(own.w)));
          lift[half] = static_cast<float>(max(static_cast<int>(__float_as_uint(most) >> 23) - 126, -100));
        }
      }
      valid[0] = flags[0] != 0, valid[1] = flags[1] != 0;
      all_valid = __all_sync(~0u, valid[0] && valid[1]);
    }
  };

  // Decides a tile's shifts, and lets the other warpgroup decide those of the next. A weight will be
  // 2^(score + shift of its head). Returns the version of `heads` that has them.
  __device__ uint32_t decide_shifts(float (&score)[kScores], const Tokens& tokens, uint32_t tile, bool first) {
    if (!tokens.all_valid) {
      compiler_fence();  // a branch, as it is rare
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (!tokens.valid[i / 2 % 2]) score[i] = -INFINITY;
    }
    const float (&lift)[2] = tokens.lift;
    wait(s.decided, tile % 2 ^ 1);
    const uint32_t version = s.version;
    if constexpr (kMaxLogits) {
      const float2 most = over_tokens(
          [&](int j) -> float2 {
            const float4 own = heads(version, j);
            return {fmaxf(score[4 * j] * own.x, score[4 * j + 2] * own.x),
                    fmaxf(score[4 * j + 1] * own.z, score[4 * j + 3] * own.z)};
          },
          larger);
      max_score[0] = fmaxf(max_score[0], most.x), max_score[1] = fmaxf(max_score[1], most.y);
    }
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float4 own = heads(version, j);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        most[half] = fmaxf(most[half], fmaxf(fmaf(score[4 * j + 2 * half], own.x, own.y),
                                             fmaf(score[4 * j + 2 * half + 1], own.z, own.w)));
    }
    const bool raises = vote(first || fmaxf(most[0] + lift[0], most[1] + lift[1]) > kTop + kSlack);
    if (raises) raise_row_max(score, lift, version, tile, first);
    if (warp == 0 && lane == 0) s.raised[tile % kKept] = raises && !first;
    arrive_as_warp(s.decided);
    return version ^ raises;
  }

  // A tile's weights, rounded to e4m3: words of tokens lane / 4 and that plus 8, for both heads of a pair. Without
  // scales all groups have the same.
  static constexpr int kWeights = kScaled ? kGroups : 1;  // of a token and head
  using Words = uint32_t[kWeights][kPairs];

  __device__ void find_weights(const float (&score)[kScores], Words& words, int stage, uint32_t version) {
    float4 scale[2] = {};
    if constexpr (kScaled) scale[0] = scales(stage, 0), scale[1] = scales(stage, 1);
    add_total(over_tokens(
                  [&](int j) -> float2 {
                    const float4 own = heads(version, j);
                    float weight[2][2];  // head, half
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                      weight[0][half] = exp2_approximate(fmaf(score[4 * j + 2 * half], own.x, own.y));
                      weight[1][half] = exp2_approximate(fmaf(score[4 * j + 2 * half + 1], own.z, own.w));
                    }
#pragma unroll
                    for (int g = 0; g < kWeights; ++g) {
                      const auto both = [&](int head) -> uint32_t {
                        if constexpr (!kScaled) return to_e4m3x2(weight[head][0], weight[head][1]);
                        return to_e4m3x2(weight[head][0] * of_group(scale[0], g),
                                         weight[head][1] * of_group(scale[1], g));
                      };
                      words[g][j] = both(0) | both(1) << 16;
                    }
                    return {weight[0][0] + weight[0][1], weight[1][0] + weight[1][1]};
                  },
                  [](float a, float b) { return a + b; }),
              version);
  }

  static __device__ float larger(float a, float b) { return fmaxf(a, b); }

  __device__ void add_total(float2 sum, uint32_t version) {
    const float4 own = heads(version, lane / 4);
    const float now[2] = {own.y, own.w};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (shift[i] != now[i]) total[i] *= exp2_approximate(now[i] - shift[i]), shift[i] = now[i];
    total[0] += sum.x, total[1] += sum.y;
  }

  // The largest score so far, with its lift, becomes the row max of each head. Its shift brings such a weight to
  // 2^kTop, or less where scores are so large that fp32 rounds them.
  __device__ void raise_row_max(const float (&score)[kScores], const float (&lift)[2], uint32_t version, uint32_t tile,
                                bool first) {
    *reinterpret_cast<float2*>(&s.of_warp[group][warp][own_pair()]) = over_tokens(
        [&](int j) -> float2 {
          const float4 own = heads(version, j);
          return {fmaxf(fmaf(score[4 * j], own.x, lift[0]), fmaf(score[4 * j + 2], own.x, lift[1])),
                  fmaxf(fmaf(score[4 * j + 1], own.z, lift[0]), fmaf(score[4 * j + 3], own.z, lift[1]))};
        },
        larger);
    sync_named<128>(kGroupBarrier + group);
    if (lane < 16) {
      const int head = 16 * warp + lane;
      float top = kLowest;
#pragma unroll
      for (int i = 0; i < 4; ++i) top = fmaxf(top, s.of_warp[group][i][head]);
      const auto [q_scale, before] = s.heads[version][head];
      const float own = kTop - top - fabsf(top) * 0x1p-22f, after = first ? own : fminf(before, own);
      s.heads[version ^ 1][head] = {q_scale, after};
      s.rescale[tile % kKept][head] = exp2_approximate(after - before);
    }
    if (warp == 0 && lane == 0) s.version = version ^ 1;
    sync_named<128>(kGroupBarrier + group);
  }

  // Stores weights for both warpgroups, once these have read the tile before.
  __device__ void publish(const Words& words, uint32_t tile) {
    wait(s.probs_empty, tile % 2 ^ 1);
    // a row is a head; a warp's tokens are a piece
    const uint32_t own = s.probs[0].address() + lane * kRowBytes + offset_in_row(lane % 8, warp);
#pragma unroll
    for (int g = 0; g < kWeights; ++g)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_tiles_transposed(
            other_piece(own, g % 2 * 4) + g / 2 * static_cast<uint32_t>(sizeof(s.probs[0])) + half * 32 * kRowBytes,
            {words[g][4 * half], words[g][4 * half + 1], words[g][4 * half + 2], words[g][4 * half + 3]});
    fence_async_shared();
    arrive_as_warp(s.probs_full);
  }

  // ---- values ----

  __device__ void rescale(uint32_t tile) {
    if (!s.raised[tile % kKept]) return;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&s.rescale[tile % kKept][8 * j + 2 * (lane % 4)]);
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
    a[0] = __byte_perm(pairs[0], pairs[1], 0x6240), a[1] = __byte_perm(pairs[0], pairs[1], 0x7351);
    a[2] = __byte_perm(pairs[2], pairs[3], 0x6240), a[3] = __byte_perm(pairs[2], pairs[3], 0x7351);
  }

  using Values = uint32_t[kSteps][kBlocks][4];

  // The warpgroup's half of a tile, as operand A. The tile's stage is free then, as far as this warp is concerned.
  __device__ void load_values(Values& values, uint32_t tile) {
    const int stage = tile % kStages;
    const uint32_t rows = s.stages[stage].address() + lane * Memory::kPitch + group * 256 + warp * kPieceBytes;
    wait(s.full[stage], tile / kStages % 2);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) load_block(values[step][b], rows + 32 * step * Memory::kPitch + 64 * b);
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
        wgmma<Atom>(out[b], values[step][b], probs + (((kScaled ? b / 2 * 64 : 0) + step * 32) >> 4));
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
    rescale(tile);
  }

  // All of this, without anything beside it.
  __device__ void add_values(uint32_t tile) {
    Values values;
    load_values(values, tile);
    add_loaded_values(values, tile);
  }
  __device__ void add_loaded_values(Values& values, uint32_t tile) {
    wait_for_probs(tile);
    begin_values(values);
    end_values<0>();
  }

  // ---- a token ----

  // Queries of half of the heads that a warp loads.
  static constexpr int kOwnHeads = kHeads / kConsumerWarps, kAtOnce = kOwnHeads / 2;
  struct Queries {
    RoundedQueries<!kScaled> of[kAtOnce];
  };
  __device__ int first_head(int half) const { return (4 * group + warp) * kOwnHeads + half * kAtOnce; }
  __device__ void load_half(Queries& queries, int token, int half, bool valid = true) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) queries.of[i].load(p, token, head_begin + first_head(half) + i, valid, lane);
  }
  __device__ void store_half(const Queries& queries, int half) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) queries.of[i].store(p.scale, s.q, s.q_rope, s.heads, first_head(half) + i, lane);
  }

  // Both warpgroups store a token's queries; the ones before have been read. The first half is loaded already.
  __device__ void store_queries(const Queries& first, int token) {
    Queries second;
    load_half(second, token, 1);
    store_half(first, 0);
    store_half(second, 1);
    fence_async_shared();
    sync();
  }

  __device__ void sync() const { sync_named<32 * kConsumerWarps>(kTokenBarrier); }

  __device__ void run(const CtaWork& cta) {
    uint32_t tile = 0;
    Queries queries;  // of the token that comes next
    load_half(queries, cta.token_begin, 0, cta.token_begin < cta.token_end);
    for (int token = cta.token_begin; token < cta.token_end; ++token) {
      const TokenWork work = cta.work(token);
      const uint32_t begin = tile, end = tile + work.tile_end - work.tile_begin;
#pragma unroll
      for (int i = 0; i < 2; ++i) total[i] = 0.0f, shift[i] = -kLowest, max_score[i] = kLowest;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kScores; ++i) out[b][i] = 0.0f;
      if (begin < end) store_queries(queries, token);
      tile += tile % 2 != group;
      const bool scores_any = tile < end;
      Values values;  // of a tile, loaded before they can be added: nothing reads a tile's stage after that
      if (scores_any) {
        float score[kScores];
        Operands keys;
        Words words;
        const int stage = tile % kStages;
        wait(s.full[stage], tile / kStages % 2);
        load_first_keys(keys, stage);
        begin_scores(score, keys);
        const Tokens tokens(*this, stage);
        end_scores(score, keys, stage);
        const uint32_t version = decide_shifts(score, tokens, tile, tile == begin);
        if (tile > begin) add_values(tile - 1);
        find_weights(score, words, stage, version);
        load_values(values, tile);
        publish(words, tile);
      }
      for (tile += 2; tile < end; tile += 2) {
        float score[kScores];
        Operands keys;
        Words words;
        const int stage = tile % kStages;
        wait(s.full[stage], tile / kStages % 2);
        load_first_keys(keys, stage);
        wait_for_probs(tile - 2);
        begin_values(values);
        begin_scores(score, keys);
        const Tokens tokens(*this, stage);
        end_values<1>();
        end_scores(score, keys, stage);
        load_values(values, tile - 1);
        const uint32_t version = decide_shifts(score, tokens, tile, false);
        wait_for_probs(tile - 1);
        begin_values(values);
        find_weights(score, words, stage, version);
        end_values<0>();
        load_values(values, tile);
        publish(words, tile);
      }
      if (scores_any) add_loaded_values(values, tile - 2);  // of its last tile
      if (begin < end && (end - 1) % 2 != group) add_values(end - 1);
      tile = end;
      load_half(queries, token + 1, 0, token + 1 < cta.token_end);
      finish(work, cta.partial(work));
    }
  }

  // ---- a token's results ----

  __device__ int own_pair() const { return 8 * (lane / 4) + 2 * (lane % 4); }  // its first head

  // Tells both warpgroups what the warps have of each head.
  __device__ void tell(const float (&of_pair)[2]) {
    *reinterpret_cast<float2*>(&s.of_warp[group][warp][own_pair()]) = {of_pair[0], of_pair[1]};
    sync();
  }

  __device__ void finish(const TokenWork& work, int64_t partial) {
    if (warp == 0) *reinterpret_cast<float2*>(&s.shift[group][own_pair()]) = {shift[0], shift[1]};
    const int own = threadIdx.x % (32 * kConsumerWarps) % kHeads;
    float most = kLowest;
    if constexpr (kMaxLogits) {
      tell(max_score);
      const auto& of = s.of_warp;
#pragma unroll
      for (int i = 0; i < 4; ++i) most = fmaxf(most, fmaxf(of[0][i][own], of[1][i][own]));
      sync();
    }
    tell(total);
    if (4 * group + warp < kHeads / 32) {
      const float last = fminf(s.shift[0][own], s.shift[1][own]);
      float sum[2];
#pragma unroll
      for (int g = 0; g < kConsumerGroups; ++g) {
        const auto& of = s.of_warp[g];
        sum[g] = ((of[0][own] + of[1][own]) + (of[2][own] + of[3][own])) * exp2_approximate(last - s.shift[g][own]);
      }
      s.factor[own] = finish_head(p, work.token, head_begin + own, work.whole(), partial,
                                  add_in_any_order(sum[0], sum[1]), -last, most);
    }
    sync();
    write(work, partial, hidden(lane));
  }

  // Eight lanes have 16 neighbouring dims of a head.
  __device__ void write(const TokenWork& work, int64_t partial, int lane) {
    const Partials partials(p.workspace, p.ctas, p.heads);
    const int pair = 2 * (lane % 4), dim = group * (kBlocks * 64) + warp * 16 + 2 * (lane / 4);
    const int heads = p.heads - head_begin - pair;  // from the lane's first on
    const auto each = [&](auto* to, int64_t next_head, auto store) {
#pragma unroll
      for (int i = 0; i < kPairs * 2; ++i) {
        const int c = i % 2, own = 8 * (i / 2) + c;
        if (own < heads) {
          const float by = s.factor[pair + own];
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
            store(to + 64 * b, out[b][4 * (i / 2) + c] * by, out[b][4 * (i / 2) + 2 + c] * by);
        }
        to += c == 0 ? next_head : 7 * next_head;
      }
    };
    if (work.whole())
      each(p.out + p.offset(p.out_strides, work.token, head_begin + pair) + dim, p.out_strides.head,
           [](uint16_t* to, float a, float b) { *reinterpret_cast<uint32_t*>(to) = pack_bf16(a, b); });
    else
      each(partials.out + partials.row(partial, head_begin + pair) * kValueDim + dim, int64_t{kValueDim},
           [](float* to, float a, float b) { *reinterpret_cast<float2*>(to) = {a, b}; });
  }
};

// Four warps load rows. A warp computes the addresses of its rows of two tiles at once, a lane a row.
template <Rows kRows>
struct Producer {
  static constexpr int kBatch = 32 / kWarpRows;  // tiles
  static constexpr uint32_t kAllRows = (1 << kWarpRows) - 1;
  static constexpr int kBytes = Shared<kRows>::kBytes, kPitch = Shared<kRows>::kPitch;

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
      copy(s, stage, first, cache, own, p.row_unit, lane);
    }
  }

  // Starts the copies of a warp's rows, one each. `own` is where row lane % kWarpRows of them lies. Missing rows become
  // zeros, as values are multiplied by weights of 0.
  static __device__ void copy(Shared<kRows>& s, int stage, int first, const uint8_t* cache, uint32_t own, uint32_t unit,
                              int lane) {
    const bool valid = own != kNoRow;
    const uint32_t rows = __ballot_sync(~0u, valid && lane < kWarpRows);
    uint8_t (&to)[kTileTokens][kPitch] = s.stages[stage].rows;
    if (lane < kWarpRows) s.valid[stage][first + lane] = valid;
    if (rows != kAllRows) {
      for (uint32_t missing = rows ^ kAllRows; missing; missing &= missing - 1)
        for (int at = lane * kPieceBytes; at < kBytes; at += 32 * kPieceBytes)
          *reinterpret_cast<uint4*>(&to[first + __ffs(static_cast<int>(missing)) - 1][at]) = {};
      fence_async_shared();  // bulk copies will come to the same rows
    }
    __syncwarp();
    if (lane < kWarpArrivals) {
      if (lane == 0)
        arrive_and_expect(s.full[stage], __popc(rows) * kBytes);
      else
        s.full[stage].arrive();
    }
    __syncwarp();
    if (lane < kWarpRows && valid)
      copy_bulk(cast_smem_ptr_to_uint(to[first + lane]), cache + uint64_t{own} * unit, kBytes, s.full[stage]);
  }
};

// blockIdx.x: a group of heads, y: the plan's entry.
template <Rows kRows, Form kForm>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kRows>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      s.full[i].init(kProducerWarps * kWarpArrivals);
      s.empty[i].init(kConsumerWarps * kWarpArrivals);
    }
    s.decided.init(4 * kWarpArrivals), s.probs_full.init(4 * kWarpArrivals),
        s.probs_empty.init(kConsumerWarps * kWarpArrivals);
    cutlass::arch::fence_barrier_init();
    s.version = 0, s.touched = touch(p);
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
