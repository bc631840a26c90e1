// Sparse attention for 17 heads and more on Hopper (33 and more with fp8_ds_mla and nvfp4_352 rows), 64 heads per CTA.
// Heads are the 64 rows of wgmma:
//
//   scores  S [64 heads x 64 tokens] = Q [64 x 576] K^T     (or 512)
//   values  O [64 heads x 512 dims] += P [64 x 64] V [64 x 512]
//
// O takes half of all registers, so two warpgroups have 256 dims each. The first one also computes the scores. A row of
// scores lies in four lanes, so the softmax needs no barrier. The first warpgroup multiplies its P from
// registers, and leaves them in shared memory for the second one. Eight warps load the tiles.
//
//   produce   | convert i + 1 ........................  | convert i + 2
//   scoring   | scores i | softmax i | values i, left   | scores i + 1 ...
//   adding    | find rows of i + 2   | values i, right  | ask for them ...
//
// fp8_ds_mla rows are converted to f16 as a whole, because with 64 columns of scores there are no registers to keep the
// groups' accumulators apart. Scales, and e4m3 times its scale, are rounded to f16: by 2^-11 at most. For these rows
// the second warpgroup copies the raw rows and the eight warps convert them. All other rows are copied, and converted
// if needed, by the eight warps alone. Staged rows are fp8_ds_mla rows that an earlier kernel converted, to the same
// bits.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/m64/config.h"
#include "cuda/attention/sm90/queries.cuh"
#include "cuda/attention/sm90/results.cuh"
#include "cuda/common/compact_row.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::m64 {

constexpr int kTokenBarrier = 1;  // named barrier of both consumer warpgroups

// Staging offset of raw fp8 row i of a producer warp's eight, from the warp's part of block 0 on: inside the warp's
// part of block i, which it will be converted into. The offset keeps the row's alignment modulo 32 bytes, because
// cp.async fetches an L2 sector twice when its halves land in different 32-byte segments. And of eight rows' scales no
// more than two lie in one bank. Rope is the exception: half of the sectors of every other row are fetched twice, which
// costs less than moving it once more.
__device__ __forceinline__ uint32_t offset_of_row(int i, uint32_t odd) { return i * (kBlockBytes + 32) + odd * 16; }

// The offset of a piece of a row's rope, from the producer warp's part of block 0 on.
__device__ __forceinline__ uint32_t offset_of_rope(int row, int piece) {
  return kLatentBlocks * kBlockBytes + row * kRowBytes + offset_of_piece(kLatentBlocks, piece, row);
}

// A producer warp's eight fp8 rows of a tile. All are read into registers, then stored back as f16. `part` is the
// warp's part of block 0. Rope has been copied to its final address and hardly ever changes.
struct ScaledRows {
  uint4 fp8[kWarpRows];  // 16 bytes of each row
  float scale;           // of row lane % 8, group lane / 8

  // Bit 8 * i + 1 of `valid` is the parity of row i's address in units of 16 bytes.
  __device__ void load(uint32_t part, uint64_t valid, int lane) {
    const auto row = [&](int i) { return part + offset_of_row(i, valid >> (8 * i + 1) & 1); };
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) fp8[i] = load_piece(row(i) + kPieceBytes * lane);
    asm volatile("ld.shared.f32 %0, [%1];"
                 : "=f"(scale)
                 : "r"(row(lane % 8) + kFp8DsMla.scale_offset() + lane / 8 * 4)
                 : "memory");
  }

  // Divides row lane % 8 by 2^kUsualPower and its excess power. Returns that power.
  __device__ int normalise() {
    float largest = fabsf(scale);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
    const int excess = excess_power(largest);
    scale *= two_to(-kUsualPower - excess);
    return excess;
  }

  // Divides rope by the rows' excess powers; `excess` is that of row lane % 8.
  static __device__ void change_rope(uint32_t part, int excess, int lane) {
    if (!__any_sync(~0u, excess != 0)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 4 * i + lane / 8;
      const float down = two_to(-__shfl_sync(~0u, excess, row));
      const uint32_t address = part + offset_of_rope(row, lane % 8);
      store_piece(address, times<Number::bf16>(load_piece(address), pack_bf16(down, down)));
    }
  }

  __device__ void store(uint32_t part, int lane) const {
    const int block = lane / 4, piece = lane % 4 * 2;
    const uint32_t to = part + block * kBlockBytes + offset_of_piece(block, piece, 0);
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const float own = __shfl_sync(~0u, scale, lane / 8 * 8 + i);
      const uint32_t by = pack_f16(own, own);
      store_piece(rows_further(to, i), times<Number::f16>(e4m3_to_f16(fp8[i].x, fp8[i].y), by));
      store_piece(rows_further(other_piece(to, 1), i), times<Number::f16>(e4m3_to_f16(fp8[i].z, fp8[i].w), by));
    }
  }
};

template <Rows kRows>
struct Consumer {
  static constexpr bool kScaled = has_powers(kRows);
  static constexpr Number kNumber = kScaled ? Number::f16 : number_of(kRows);  // of latent dims and P
  using ScoreAtom = HalfAtom<kNumber, 64, Major::K, Major::K>;
  using RopeAtom = HalfAtom<number_of(kRows), 64, Major::K, Major::K>;
  using ValueAtom = std::conditional_t<kNumber == Number::f16, gmma::MMA_64x128x16_F32F16F16_RS<Major::K, Major::MN>,
                                       gmma::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>>;
  static constexpr float kUsual = kScaled ? kUsualFactor : 1.0f;  // undoes the rows' usual power of two
  static constexpr int kScores = 32;                              // per lane, of 64 x 64
  static constexpr int kSteps = kTileTokens / 16;                 // of a product over tokens
  static constexpr int kWarpHeads = kHeads / 4;

  const AttentionProblem& p;
  Shared<kRows>& s;
  const int head_begin;
  const int group, warp, lane;  // warp of the warpgroup

  // Heads 16 * warp + lane / 4 and that plus 8; dims kGroupDims * group + 8 * j + 2 * (lane % 4) and the next.
  float out[kGroupDims / 2];

  static __device__ constexpr int half(int i) { return i / 2 % 2; }  // 0: the lane's first head, 1: the second
  __device__ int head(int half) const { return head_of(half, lane); }
  __device__ int head_of(int half, int lane) const { return warp * 16 + lane / 4 + 8 * half; }

  // out += P times values; probs[step] is operand A [64 x 16] in registers.
  __device__ void add_values(int stage, const uint32_t (&probs)[kSteps][4]) {
    constexpr int kHalf = kGroupDims / 2, kHalfBytes = kHalf / kBlockDims * kBlockBytes;
    const uint64_t left = smem_descriptor(cast_smem_ptr_to_uint(s.tiles[stage]) + 2 * kHalfBytes * group, kBlockBytes);
    fence_acc(out);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t values = left + ((step * 16 * kRowBytes) >> 4);
      wgmma<ValueAtom>(out, probs[step], values);
      wgmma<ValueAtom, kHalf / 2>(out, probs[step], values + (kHalfBytes >> 4));
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    fence_acc(out);
  }

  // The lane's address for ldmatrix and stmatrix of P: the warp's 16 heads, 16 tokens of a step.
  __device__ uint32_t probs_address(int step) const {
    const int row = warp * kWarpHeads + lane % 16, piece = 2 * step + lane / 16;
    return s.probs.address(row, piece);
  }

  __device__ void rescale(const float (&by)[2]) {
    if (!__any_sync(~0u, by[0] != 1.0f || by[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kGroupDims / 2; ++i) out[i] *= by[half(i)];
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kGroupDims / 2; ++i) out[i] = 0.0f;
  }

  // Writes the warpgroup's dims of a token. `stage` is that of its last tile, which has been read, or -1 without tiles.
  // Whole tokens go through that stage's memory, which takes fewer instructions than stores from registers.
  __device__ void write(const TokenWork& work, int64_t partial, const float (&factor)[2], int stage) {
    if constexpr (has_compact_splits(kRows))
      if (!work.whole()) return write_compact(partial, factor, hidden(this->lane));
#pragma unroll
    for (int i = 0; i < kGroupDims / 2; ++i) out[i] *= factor[half(i)];
    const int lane = hidden(this->lane);
    if (!has_compact_splits(kRows) && !work.whole())
      write_split(partial, lane);
    else if (stage < 0)
      write_zeros(work.token, lane);
    else
      write_whole(work.token,
                  cast_smem_ptr_to_uint(s.tiles[stage]) + group * (kGroupDims / kBlockDims) * kBlockBytes +
                      warp * kWarpHeads * kGroupDims * 2,
                  lane);
  }

  // Through 8 KB of shared memory per warp, where heads are swizzled rows of 512 bytes. From there they go out as rows.
  __device__ void write_whole(int64_t token, uint32_t heads, int lane) {
    const int row = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < kGroupDims / 8; j += 2) {
      const int piece = j + lane / 16;
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = mla::cuda::pack<number_of(kRows)>(out[4 * j + 2 * i], out[4 * j + 2 * i + 1]);
      store_tiles(swizzled<kGroupDims * 2>(heads, row, swapped(j / 8, piece)), pairs);
    }
    __syncwarp();
    uint16_t* to = p.out + group * kGroupDims + lane * 8;
    const int first = head_begin + warp * kWarpHeads;
    const int64_t offset = p.offset(p.out_strides, token, first + lane % kWarpHeads);
#pragma unroll 4
    for (int i = 0; i < kWarpHeads; ++i) {
      const uint4 piece = load_piece(swizzled<kGroupDims * 2>(heads, i, lane));
      const int64_t own = __shfl_sync(~0u, offset, i);
      if (first + i < p.heads) *reinterpret_cast<uint4*>(to + own) = piece;
    }
  }

  __device__ void write_zeros(int64_t token, int lane) {
    uint16_t* to = p.out + group * kGroupDims + lane * 8;
    for (int head = head_begin + warp * kWarpHeads, i = 0; i < kWarpHeads && head < p.heads; ++i, ++head)
      *reinterpret_cast<uint4*>(to + p.offset(p.out_strides, token, head)) = {};
  }

  __device__ void write_split(int64_t partial, int lane) {
    const Partials partials(p.workspace, p.ctas, p.heads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = head_begin + head_of(h, lane);
      if (own >= p.heads) continue;
      float* to = partials.out + partials.row(partial, own) * kValueDim + group * kGroupDims + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kGroupDims / 8; ++j)
        *reinterpret_cast<float2*>(to + swapped(j / 8, j) * 8) = {out[4 * j + 2 * h], out[4 * j + 2 * h + 1]};
    }
  }

  // Four lanes have a row. Numbers keep the accumulators' order, so each lane stores whole pieces.
  __device__ void write_compact(int64_t partial, const float (&factor)[2], int lane) {
    const Partials partials(p.workspace, p.ctas, p.heads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < kGroupDims / 2; ++i)
        if (half(i) == h) largest = fmaxf(largest, fabsf(out[i]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const int own = head_begin + head_of(h, lane), power = compact_power(largest * fabsf(factor[h]));
      if (own >= p.heads) continue;
      const float by = two_to(-power) * factor[h];
      CompactRow& row = compact_row(partials, partials.row(partial, own));
      if (lane % 4 == 0) row.factor[group] = two_to(power);
#pragma unroll
      for (int begin = 0; begin < kGroupDims / 8; begin += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = swapped(begin / 8, begin + i);
          pairs[i] = pack_f16(out[4 * j + 2 * h] * by, out[4 * j + 2 * h + 1] * by);
        }
        row.pieces[group * kGroupDims / 8 + begin + lane % 4] = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
};

// The first consumer warpgroup: scores, softmax, and the left half of the output.
template <Rows kRows, Form kForm>
struct Scorer : Consumer<kRows> {
  using Base = Consumer<kRows>;
  using Base::group, Base::half, Base::head, Base::head_begin, Base::kScaled, Base::kUsual, Base::kScores, Base::kSteps,
      Base::lane, Base::out, Base::p, Base::s, Base::warp;
  using typename Base::ScoreAtom, typename Base::RopeAtom;

  static constexpr bool kMaxLogits = kForm == Form::sparse_max_logits, kDense = kForm == Form::dense;

  float row_max[2];    // P is 2^(score - row_max); it may lag behind by kSlack
  float total[2];      // of the lane's columns
  float max_score[2];  // takes no registers unless kMaxLogits
  float q_scale[2];

  // Scores, not yet multiplied by q_scale and the rows' powers of two.
  __device__ void compute_scores(float (&score)[kScores], int stage) {
    const uint64_t q = smem_descriptor(cast_smem_ptr_to_uint(s.q)),
                   k = smem_descriptor(cast_smem_ptr_to_uint(s.tiles[stage]));
    cute::warpgroup_arrive();
#pragma unroll
    for (int block = 0; block < blocks_of(kRows); ++block)
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t a = q + ((block * kHeads * kRowBytes + step * 32) >> 4);
        const uint64_t b = k + ((block * kBlockBytes + step * 32) >> 4);
        const bool add = block > 0 || step > 0;
        if (block < kLatentBlocks)
          wgmma<ScoreAtom>(score, a, b, add);
        else
          wgmma<RopeAtom>(score, a, b, add);
      }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    fence_acc(score);
  }

  // Whether all of a tile's slots are valid and no row has an excess power.
  __device__ bool plain(int stage) const {
    const uint16_t two = *reinterpret_cast<const uint16_t*>(s.plain[stage] + 2 * lane);
    return __all_sync(~0u, two == 0x0101) && p.scale >= 0.0f;
  }

  // Raises row_max if it lags too far behind. `top` is the largest score of the lane's columns; four lanes share a row.
  // `by` becomes the factor of the accumulators so far.
  __device__ void move_row_max(float (&top)[2], float (&by)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
      top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
      by[h] = 1.0f;
      if (top[h] > row_max[h] + kSlack) {
        by[h] = exp2_approximate(row_max[h] - top[h]);
        row_max[h] = top[h];
        total[h] *= by[h];
      }
    }
  }

  __device__ uint32_t pack(float first, float second) const { return mla::cuda::pack<Base::kNumber>(first, second); }

  // The softmax of a plain tile, with the current row_max and before the tile's maximum is known. If a P is too
  // large, as in a token's first tile, all are computed again with the new row_max.
  __device__ void softmax_of_plain(const float (&score)[kScores], uint32_t (&probs)[kSteps][4], float (&by)[2]) {
    const float before[2] = {total[0], total[1]};
    uint32_t largest = 0;  // of each half, compared as integers, which have the same order
    const auto find_probs = [&] {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        float two[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          two[c] = exp2_approximate(fmaf(score[i + c], q_scale[half(i)], -row_max[half(i)]));
          total[half(i)] += two[c];
        }
        probs[i / 8][i / 2 % 4] = pack(two[0], two[1]);
        largest = __vmaxu2(largest, probs[i / 8][i / 2 % 4]);
      }
    };
    find_probs();
    by[0] = by[1] = 1.0f;
    constexpr float kMost = 1 << static_cast<int>(kSlack);
    const uint32_t most = pack(kMost, kMost);
    const bool too_large = __any_sync(~0u, __vmaxu2(largest, most) != most);
    if (kMaxLogits || too_large) {
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < kScores; ++i) top[half(i)] = fmaxf(top[half(i)], score[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(top[h] * q_scale[h], kLowest);
        if constexpr (kMaxLogits) max_score[h] = fmaxf(max_score[h], top[h]);
        if (too_large) total[h] = before[h];
      }
      if (too_large) {
        move_row_max(top, by);
        find_probs();
      }
    }
  }

  // The softmax of any tile. A head sees only the first `seen` slots of it.
  __device__ void softmax(float (&score)[kScores], int stage, const int (&seen)[2], float (&by)[2]) {
    float top[2] = {kLowest, kLowest};
    float back[kScaled ? kScores / 2 : 1];  // 2^-bias
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = 8 * j + 2 * (lane % 4) + c;
        float scale = 1.0f, bias;
        if constexpr (kScaled) {
          const Column column = s.columns[stage][token];
          scale = column.power, bias = column.bias;
          back[2 * j + c] = inverse_of_power(scale);
        } else {
          bias = s.plain[stage][token] ? 0.0f : -INFINITY;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& own = score[4 * j + 2 * h + c];
          own = !kDense || token < seen[h] ? own * (q_scale[h] * scale) + bias : -INFINITY;
          top[h] = fmaxf(top[h], own);
          if (kMaxLogits && bias > -INFINITY) max_score[h] = fmaxf(max_score[h], own - bias);
        }
      }
    move_row_max(top, by);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      score[i] = exp2_approximate(score[i] - row_max[half(i)]);
      total[half(i)] += kScaled ? score[i] * back[i / 4 * 2 + i % 2] : score[i];
    }
  }

  __device__ void pack_probs(uint32_t (&probs)[kSteps][4], const float (&prob)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) probs[i / 8][i / 2 % 4] = pack(prob[i], prob[i + 1]);
  }

  __device__ void store_probs(const uint32_t (&probs)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) store_tiles(this->probs_address(step), probs[step]);
  }

  // How many slots of a tile the lane's heads see. `left` counts the token's remaining tiles, this one included.
  __device__ void find_seen(const CtaWork& cta, int token, int left, int (&seen)[2]) const {
    const TokenWork work = cta.work(token);
#pragma unroll
    for (int h = 0; h < 2; ++h) seen[h] = cta.seen_of_tile(work, work.tile_end - left, head_begin + head(h));
  }

  __device__ void run(const CtaWork& cta) {
    int tile = 0, tokens = 0;
    for (int token = cta.token_begin; token < cta.token_end; ++token) {
      const TokenWork work = cta.work(token);
      const int end = tile + work.tile_end - work.tile_begin;
      const int hidden_tiles = kDense ? work.tile_end - cta.first_hidden_tile(work) : 0;  // at the end
      this->clear();
#pragma unroll
      for (int h = 0; h < 2; ++h) row_max[h] = max_score[h] = kLowest, total[h] = 0.0f;
      if (tile < end) {
        wait(s.q_full, tokens % 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) q_scale[h] = s.q_scale[head(h)] * kUsual;
      }
      for (; tile < end; ++tile) {
        const int stage = tile % kStages;
        float score[kScores], by[2];
        wait(s.full[stage], tile / kStages % 2);
        if constexpr (!is_scaled(kRows)) fence_async_shared();
        const bool hides = kDense && end - tile <= hidden_tiles, is_plain = plain(stage) && !hides;
        compute_scores(score, stage);
        if (tile == end - 1) arrive_as_warp(s.q_empty);
        uint32_t probs[kSteps][4];
        if (is_plain) {
          softmax_of_plain(score, probs, by);
        } else {
          int seen[2] = {kTileTokens, kTileTokens};
          if (hides) find_seen(cta, token, end - tile, seen);
          softmax(score, stage, seen, by);
          pack_probs(probs, score);
        }
        wait(s.probs_empty, tile % 2 ^ 1);
        store_probs(probs);
        if (lane % 4 == 0) s.rescale[head(0)] = by[0], s.rescale[head(1)] = by[1];
        arrive_as_warp(s.probs_full);
        this->rescale(by);
        this->add_values(stage, probs);
        if (tile + 1 < end) arrive_as_warp(s.empty[stage]);
      }
      const bool empty = work.tile_end == work.tile_begin;
      const int last = (tile + kStages - 1) % kStages;
      finish(work, cta.partial(work), token % 2, empty ? -1 : last);
      if (!empty) arrive_as_warp(s.empty[last]), ++tokens;
    }
  }

  __device__ void finish(const TokenWork& work, int64_t partial, int parity, int stage) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        total[h] += __shfl_xor_sync(~0u, total[h], distance);
        if constexpr (kMaxLogits) max_score[h] = fmaxf(max_score[h], __shfl_xor_sync(~0u, max_score[h], distance));
      }
      if (lane % 4 == 0)
        factor[h] =
            finish_head(p, work.token, head_begin + head(h), work.whole(), partial, total[h], row_max[h], max_score[h]);
      factor[h] = __shfl_sync(~0u, factor[h], lane & ~3) * kUsual;
      if (lane % 4 == 0) s.factor[parity][head(h)] = factor[h];
    }
    sync_named<32 * kConsumerWarps>(kTokenBarrier);
    this->write(work, partial, factor, stage);
  }
};

// Copies raw fp8 rows to their staging addresses (offset_of_row) and rope to its final one.
template <bool kPaged>
struct RawRowLoader {
  static constexpr int kRows = kTileTokens / 4;  // per warp: those of two producer warps

  const AttentionProblem& p;
  TileCursor cursor;
  TileRequest<kPaged> next;
  const int warp, lane;

  // The tile to copy.
  bool any = false;
  uint32_t own;  // this lane's row
  int list;

  __device__ RawRowLoader(const CtaWork& cta, int warp, int lane)
      : p(cta.p), cursor(cta), next(cursor, warp * kRows + lane % kRows), warp(warp), lane(lane) {}

  // Computes the addresses of the next tile's rows ahead of time.
  __device__ void prepare() {
    any = next.token != next.kEnd;
    if (!any) return;
    own = next.row(p), list = next.list;
    next = TileRequest<kPaged>(cursor, warp * kRows + lane % kRows);
  }

  // Starts the copies once the stage is empty: first the rows of one producer warp, then those of the other.
  __device__ void copy(Shared<Rows::fp8_ds_mla>& s, int tile) {
    if (!any) return;
    const int stage = tile % kStages;
    const uint8_t* const cache = p.lists[list].cache.data;
    wait(s.empty[stage], tile / kStages % 2 ^ 1);
    const int lane = hidden(this->lane);
    // rope: eight lanes a row
    auto fp8 = reinterpret_cast<uint64_t>(cache + kPieceBytes * lane),
         rope = reinterpret_cast<uint64_t>(cache + kFp8DsMla.rope_offset() + kPieceBytes * (lane % 8));
    hide(fp8), hide(rope);  // or the compiler adds up each of them again for every row
    const uint32_t odd_cache = reinterpret_cast<uint64_t>(cache) / kPieceBytes & 1;
    const auto odd = [&](uint32_t row) { return (row & p.odd_unit) ^ odd_cache; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = half * kWarpRows, producer = 2 * warp + half;
      const uint32_t part = cast_smem_ptr_to_uint(s.tiles[stage]) + producer * kWarpRows * kRowBytes;
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const uint32_t row = __shfl_sync(~0u, own, first + i);
        copy_piece(part + offset_of_row(i, odd(row)) + kPieceBytes * lane, reinterpret_cast<const uint8_t*>(fp8), row,
                   p.row_unit);
      }
#pragma unroll
      for (int i = 0; i < kWarpRows; i += 4) {
        const uint32_t row = __shfl_sync(~0u, own, first + i + lane / 8);
        copy_piece(part + offset_of_rope(i + lane / 8, lane % 8), reinterpret_cast<const uint8_t*>(rope), row,
                   p.row_unit);
      }
      const uint32_t row = __shfl_sync(~0u, own, first + lane % kWarpRows);
      if (lane < kWarpRows)
        copy_piece(part + offset_of_row(lane, odd(row)) + kFp8DsMla.scale_offset(), cache + kFp8DsMla.scale_offset(),
                   row, p.row_unit);
      if (lane / kWarpRows == half)
        s.valid[stage][warp * kRows + lane] = static_cast<uint8_t>(odd(own) << 1 | (own != kNoRow));
      arrive_when_copied(s.raw_full[stage][producer]);
      arrive_as_warp(s.raw_full[stage][producer]);
    }
  }
};

// The second consumer warpgroup: the right half of the output. With fp8_ds_mla rows it also starts the copies of the
// tile after the next one as soon as a stage is empty, while the scores of the next one are computed.
template <Rows kRows, bool kPaged>
struct Adder : Consumer<kRows> {
  using Base = Consumer<kRows>;
  using Base::head, Base::kSteps, Base::lane, Base::out, Base::s, Base::warp;

  static constexpr bool kRaw = is_scaled(kRows);

  __device__ void run(const CtaWork& cta) {
    int tile = 0;
    RawRowLoader<kPaged> loader(cta, warp, lane);
    if constexpr (kRaw)
      for (int i = 0; i < kStages; ++i) loader.prepare(), loader.copy(s, i);
    for (int token = cta.token_begin; token < cta.token_end; ++token) {
      const TokenWork work = cta.work(token);
      const int end = tile + work.tile_end - work.tile_begin;
      const bool empty = tile == end;
      this->clear();
      for (; tile < end; ++tile) {
        const int stage = tile % kStages;
        if constexpr (kRaw) {
          loader.prepare();
          if (const int token = loader.next.token; token >= 0)
            ask_l2_for_queries<kHeads, 4, blocks_of(kRows)>(loader.p, token, this->head_begin, warp, hidden(lane));
        }
        wait(s.probs_full, tile % 2);
        const float by[2] = {s.rescale[head(0)], s.rescale[head(1)]};
        uint32_t probs[kSteps][4];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_tiles(probs[step], this->probs_address(step));
        arrive_as_warp(s.probs_empty);
        this->rescale(by);
        this->add_values(stage, probs);
        if (tile + 1 < end) release(loader, tile);
      }
      sync_named<32 * kConsumerWarps>(kTokenBarrier);
      const float factor[2] = {s.factor[token % 2][head(0)], s.factor[token % 2][head(1)]};
      const int last = (tile + kStages - 1) % kStages;
      this->write(work, cta.partial(work), factor, empty ? -1 : last);
      if (!empty) release(loader, tile - 1);
    }
  }

  __device__ void release(RawRowLoader<kPaged>& loader, int tile) {
    arrive_as_warp(s.empty[tile % kStages]);
    if constexpr (kRaw) loader.copy(s, tile + kStages);
  }
};

// Stores what the softmax needs of a tile's row. `power` is its excess power.
template <Rows kRows>
__device__ void describe_column(Shared<kRows>& s, int stage, int row, bool valid, int power) {
  s.columns[stage][row] = {two_to(power), valid ? static_cast<float>(power) : -INFINITY};
  s.plain[stage][row] = valid && power == 0;
}

// A producer warp: its rows of each tile, and its heads of each token's queries.
template <Rows kRows, bool kPaged>
__device__ void produce(const AttentionProblem& p, Shared<kRows>& s, const CtaWork& cta, int head_begin, int warp,
                        int lane) {
  int tile = 0, tokens = 0;
  const auto queries = [&](int token) {
    load_queries<has_powers(kRows), kHeads>(
        p, s.q, s.q_scale, token, head_begin, warp, hidden(lane), [&] { wait(s.q_empty, tokens % 2 ^ 1); },
        1.0f / Consumer<kRows>::kUsual);
    if constexpr (is_scaled(kRows)) fence_async_shared();
    arrive_as_warp(s.q_full);
    ++tokens;
  };
  if constexpr (is_scaled(kRows)) {
    for (int token = cta.token_begin; token < cta.token_end; ++token) {
      const TokenWork work = cta.work(token);
      if (work.tile_end == work.tile_begin) continue;
      queries(token);
      for (const int end = tile + work.tile_end - work.tile_begin; tile < end; ++tile) {
        const int stage = tile % kStages, at = warp * kWarpRows + lane;
        const uint32_t part = cast_smem_ptr_to_uint(s.tiles[stage]) + warp * kWarpRows * kRowBytes;
        wait(s.raw_full[stage][warp], tile / kStages % 2);
        ScaledRows rows;
        rows.load(part, *reinterpret_cast<const uint64_t*>(s.valid[stage] + warp * kWarpRows), lane);
        const int power = rows.normalise();
        __syncwarp();
        rows.store(part, lane);
        ScaledRows::change_rope(part, power, hidden(lane));
        if (lane < kWarpRows) describe_column(s, stage, at, s.valid[stage][at] & 1, power);
        fence_async_shared();
        arrive_as_warp(s.full[stage]);
      }
    }
  } else if constexpr (is_converted(kRows)) {
    produce_converted<kRows, kPaged, 0>(cta, s.tiles, s.plain, s.full, s.empty, warp, lane, {}, queries);
  } else {
    TileCursor cursor(cta);
    TileRequest<kPaged> next(cursor, warp * kWarpRows + lane % kWarpRows);
    for (; next.token != next.kEnd; ++tile) {
      const uint32_t row = next.row(p);
      const uint8_t* cache = p.lists[next.list].cache.data;
      const int token = next.token, stage = tile % kStages;
      int power = 0;
      if constexpr (has_powers(kRows))
        if (row != kNoRow) power = *reinterpret_cast<const int8_t*>(next.scales(p));
      next = TileRequest<kPaged>(cursor, warp * kWarpRows + lane % kWarpRows);
      if (next.token >= 0)
        ask_l2_for_queries<kHeads, kProducerWarps, blocks_of(kRows)>(p, next.token, head_begin, warp, hidden(lane));
      wait(s.empty[stage], tile / kStages % 2 ^ 1);
      RowCopier::copy<blocks_of(kRows)>(s.tiles[stage], s.plain[stage], cache, row, p.row_unit, warp, lane);
      if constexpr (has_powers(kRows))
        if (lane < kWarpRows) describe_column(s, stage, warp * kWarpRows + lane, row != kNoRow, power);
      arrive_when_copied(s.full[stage]);
      arrive_as_warp(s.full[stage]);
      if (token != next.kSameToken) queries(token);
    }
  }
}

// blockIdx.x: a group of heads, y: the plan's entry.
template <Rows kRows, Form kForm>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionProblem p) {
  constexpr bool kPaged = kForm == Form::dense;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kRows>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      const bool copied = !is_scaled(kRows) && !is_converted(kRows);
      s.full[i].init(copied ? RowCopier::kArrivals : kProducerWarps * kWarpArrivals);
      for (int j = 0; j < kProducerWarps; ++j) s.raw_full[i][j].init(32 + kWarpArrivals);  // of one warp, and it
      s.empty[i].init(kConsumerWarps * kWarpArrivals);
    }
    s.q_full.init(kProducerWarps * kWarpArrivals), s.q_empty.init(4 * kWarpArrivals);
    s.probs_full.init(4 * kWarpArrivals), s.probs_empty.init(4 * kWarpArrivals);
    s.touched = touch(p);
  }
  __syncthreads();
  const int head_begin = blockIdx.x * kHeads;
  const int warp = warp_of_cta();
  const int lane = threadIdx.x % 32;
  const auto begin = [&] {
    pdl_wait();
    pdl_launch_dependents();
    return CtaWork(p, blockIdx.y, kTileTokens);
  };
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_alloc<kScoringRegisters>();
    Scorer<kRows, kForm> scorer{{p, s, head_begin, 0, warp, lane}};
    scorer.run(begin());
  } else if (warp < kConsumerWarps) {
    cutlass::arch::warpgroup_reg_alloc<kAddingRegisters>();
    Adder<kRows, kPaged> adder{{p, s, head_begin, 1, warp - 4, lane}};
    adder.run(begin());
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    produce<kRows, kPaged>(p, s, begin(), head_begin, warp - kConsumerWarps, lane);
  }
}

}  // namespace mla::cuda::sm90::m64
