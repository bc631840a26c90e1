// nvfp4_352 rows. Shared memory holds raw cache rows.
//
// Both products convert numbers to f16 in registers, scales included, just before they multiply them: operand A is K, a
// token's dims, and then V^T, a dim's tokens. So no 16-bit copy of a tile is written, and six tiles fit in flight. A
// number becomes e4m3 first, its bits moved to where e4m3 has them: that is the number divided by kNvfp4Lift.
//
// A sum over dims may have any order. So a lane's part of K is whole pieces of its two rows, and queries are stored in
// the order in which products take dims from them.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/quantised_queries.cuh"
#include "cuda/attention/sm90/swap_ab/raw_rows.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::swap_ab {

// A step of the score product takes 16 numbers of a row, four from each of four lanes: two neighbouring ones (pair 0),
// and the two eight further on (pair 1). place_in_steps() is where the first of a pair lies among the numbers of all
// steps, for lane % 4 = c. Such a lane has the row's latent pieces 8 * (c / 2) + c % 2 + 2 * j for j = 0 to 3, each of
// four words of eight numbers. A word's numbers in odd places make a step, and those in even places the next. So
// the scales of a lane's blocks lie side by side. Of rope it has piece c; a word is a step.
MLA_HOST_DEVICE constexpr int place_in_steps(int step, int c, int pair) { return 16 * step + 2 * c + 8 * pair; }
MLA_HOST_DEVICE constexpr int latent_step(int j, int word, int even) { return 8 * j + 2 * word + even; }
MLA_HOST_DEVICE constexpr int rope_step(int word) { return 32 + word; }

// A token's queries as f16, in this order. A head is divided by a power of two (HeadPower), and latent numbers are
// multiplied by kNvfp4Lift.
template <int kHeads>
struct OrderedQueries {
  static constexpr int kWarps = 8;                // share the heads
  static constexpr int kAtOnce = 1;               // heads per warp and step
  static constexpr int kStep = kWarps * kAtOnce;  // heads per step
  static constexpr uint32_t kLift = 0x54005400;   // kNvfp4Lift as a pair of f16
  static_assert(kNvfp4Lift == 64.0f);

  uint4 latent[kAtOnce][2], rope[kAtOnce];

  // Issues the loads of kAtOnce heads, from the CTA's head `first` on.
  __device__ __forceinline__ void load(const AttentionProblem& p, int64_t token, int head_begin, int first, int lane) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load_head(latent[i], rope[i], p, token, head_begin + first + i, lane);
  }

  __device__ __forceinline__ void store(float scale, uint8_t* q, float* q_scale, int first, int lane) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i;
      const HeadPower<true> power(latent[i], rope[i]);
      const float factor = power.factor();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 x = times<Number::f16>(scaled_piece(latent[i][j], factor, true), kLift);
        // eight numbers of a word
        const int piece = lane / 4 + 8 * j, c = piece / 8 * 2 + piece % 2,
                  step = latent_step(piece % 8 / 2, lane % 4, 0);
        store_pair(q, row, place_in_steps(step, c, 0), __byte_perm(x.x, x.y, 0x7632));
        store_pair(q, row, place_in_steps(step, c, 1), __byte_perm(x.z, x.w, 0x7632));
        store_pair(q, row, place_in_steps(step + 1, c, 0), __byte_perm(x.x, x.y, 0x5410));
        store_pair(q, row, place_in_steps(step + 1, c, 1), __byte_perm(x.z, x.w, 0x5410));
      }
      if (lane < 8) {
        const uint4 x = scaled_piece(rope[i], factor, true);
        const int c = lane / 2, step = rope_step(lane % 2 * 2);
        store_pair(q, row, place_in_steps(step, c, 0), x.x);
        store_pair(q, row, place_in_steps(step, c, 1), x.y);
        store_pair(q, row, place_in_steps(step + 1, c, 0), x.z);
        store_pair(q, row, place_in_steps(step + 1, c, 1), x.w);
      }
      if (lane == 0) q_scale[row] = power.q_scale(scale);
    }
  }

 private:
  static __device__ __forceinline__ void store_pair(uint8_t* q, int row, int place, uint32_t pair) {
    uint8_t* const at = q + (place / kBlockDims * kHeads + row) * kRowBytes +
                        offset_in_row(row & 7, place % kBlockDims / 8) + place % 8 * 2;
    *reinterpret_cast<uint32_t*>(at) = pair;
  }
};

template <int kHeads>
struct Nvfp4Rows : RawRows<Nvfp4Rows<kHeads>, kHeads> {
  using Raw = RawRows<Nvfp4Rows, kHeads>;
  using Raw::kLaneDims, Raw::kValueSteps, Raw::kWarpRows, Raw::lane, Raw::warp;
  using Queries = OrderedQueries<kHeads>;
  static constexpr int kStages = kHeads > 8 ? 6 : 8;    // tiles
  static constexpr int kQueries = kHeads > 16 ? 1 : 2;  // buffers for a token's queries
  static constexpr int kAccRegisters = kHeads / 2;
  static constexpr bool kAhead = kHeads <= 16;       // read values a step ahead; else registers are too few
  static constexpr int kBlocks = kLatentBlocks + 1;  // of 64 dims of queries
  static constexpr int kLatentBytes = kNvfp4.latent_bytes(), kRopeBytes = kNvfp4.rope_bytes();
  // Scales are two pieces. The first ones of all tokens lie together, and the second ones four banks further on.
  static constexpr int kScalePieces = kTileTokens * kPieceBytes + kPieceBytes;

  struct alignas(128) Stage {
    uint8_t latent[kTileTokens * kLatentBytes];  // see piece_of_row()
    uint8_t rope[kTileTokens * kRopeBytes];
    uint8_t scales[2 * kScalePieces];
  };
  struct Memory {
    Stage stages[kStages];
    alignas(1024) uint8_t q[kQueries][kBlocks][kHeads * kRowBytes];
    alignas(16) float reduction[kReductionHeads<kHeads> * kReductionStride];  // does not fit into a tile
    uint8_t valid[kStages][kTileTokens];                                      // whether the slot is one

    __device__ void* reduction_buffer(int) { return reduction; }
  };
  static constexpr bool kReducesInTile = false;  // a tile is too small

  // The first bytes of the next product with values.
  uint2 fp4[4];
  uint32_t value_scales[4];

  // log2 of an extra factor of a token's P (fp8_rows.cuh): none.
  __device__ float lift(int) const { return 0.0f; }
  // Two heads' P of the lane's upper or lower token, as operand B has them.
  __device__ uint32_t pack(float first, float second, int) const { return pack_f16(first, second); }

  // The offset of a latent piece in its row. For scores, eight lanes read two pieces that differ in `piece % 2` from
  // either half of two neighbouring rows; for values, eight read two neighbouring pieces of every other row of eight.
  static MLA_HOST_DEVICE constexpr int piece_of_row(int row, int piece) {
    const int half = piece / 8;
    return (8 * half + (piece % 8 ^ (row ^ row >> 1) % 2 * 4 ^ ((row >> 2) % 2 ^ half) * 2)) * kPieceBytes;
  }

  // Four numbers each, in even and in odd places of a word, as e4m3, divided by kNvfp4Lift.
  static __device__ uint32_t even_numbers(uint32_t word) {
    return (word << 4 & 0x80808080u) | (word << 2 & 0x1c1c1c1cu);
  }
  static __device__ uint32_t odd_numbers(uint32_t word) { return (word & 0x80808080u) | (word >> 2 & 0x1c1c1c1cu); }

  static __device__ uint32_t word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

  static __device__ uint32_t twice(uint32_t pair, int half) { return __byte_perm(pair, 0, half ? 0x3232 : 0x1010); }

  // The scores of a tile's tokens 16 * warp + lane / 4 and that plus 8, in the order of wgmma's accumulators.
  __device__ void compute_scores(float (&score)[kAccRegisters], Memory& s, int stage, int query, const float* q_scale) {
    const Stage& tile = s.stages[stage];
    const uint64_t q = smem_descriptor(cast_smem_ptr_to_uint(s.q[query]));
    const int token = warp * 16 + lane / 4, c = lane % 4;
    const uint32_t latent =
        cast_smem_ptr_to_uint(tile.latent) + token * kLatentBytes + piece_of_row(lane / 4, 8 * (c / 2) + c % 2);
    const uint32_t rope_rows = cast_smem_ptr_to_uint(tile.rope) + token * kRopeBytes + c * kPieceBytes;
    uint4 rope[2], own[2], next[2];
    uint32_t scales[2][2][2];  // of a row: its blocks in even or odd places, four each
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) rope[i] = load_piece(rope_rows + 8 * i * kRopeBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = load_piece(latent + 8 * i * kLatentBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* from = reinterpret_cast<const uint32_t*>(tile.scales + c % 2 * kScalePieces +
                                                           (token + 8 * i) * kPieceBytes + c / 2 * 4);
      e4m3_to_f16(from[0], scales[i][0]);
      e4m3_to_f16(from[2], scales[i][1]);
      bias[i] = s.valid[stage][token + 8 * i] ? 0.0f : -INFINITY;
    }
    uint32_t rows[2][2][4];
    const auto multiply = [&](int step, const uint32_t (&a)[2][4]) {
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < 2; ++i)
        wgmma<F16RowsAtom<kHeads>>(score, a[i], q + (((step + i) / 4 * kHeads * kRowBytes + (step + i) % 4 * 32) >> 4),
                                   step + i != rope_step(0));
      cute::warpgroup_commit_batch();
    };
    fence_acc(score);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t (&a)[2][4] = rows[half];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          uint32_t pairs[2];
          e4m3_to_f16(word_of(rope[row], 2 * half + i), pairs);
          a[i][row] = pairs[0], a[i][2 + row] = pairs[1];
        }
      multiply(rope_step(2 * half), a);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint4(&at)[2] = j % 2 ? next : own;
      uint4(&after)[2] = j % 2 ? own : next;
      if (j < 3) {
#pragma unroll
        for (int i = 0; i < 2; ++i) after[i] = load_piece(other_piece(latent, 2 * (j + 1)) + 8 * i * kLatentBytes);
      } else if constexpr (kAhead) {
        load(fp4, value_scales, tile, 0);
      }
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t (&a)[2][4] = rows[word % 2];
        cute::warpgroup_wait<1>();
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const uint32_t by = twice(scales[row][word / 2][j / 2], j % 2), numbers = word_of(at[row], word);
          uint32_t odd[2], even[2];
          e4m3_to_f16(odd_numbers(numbers), odd);
          e4m3_to_f16(even_numbers(numbers), even);
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            a[0][2 * pair + row] = times<Number::f16>(odd[pair], by);
            a[1][2 * pair + row] = times<Number::f16>(even[pair], by);
          }
        }
        multiply(latent_step(j, word, 0), a);
      }
    }
    cute::warpgroup_wait<0>();
    fence_acc(score);
    scale_scores(score, score, q_scale, bias, lane);
  }

  // The lane's block of 16 dims of each of four tokens: 16 * step + 2 * (lane % 4), the next, and both plus 8; and the
  // block's scales.
  __device__ void load(uint2 (&numbers)[4], uint32_t (&scales)[4], const Stage& tile, int step) const {
    const int block = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 2 * c + i % 2, token = 16 * step + 8 * (i / 2) + row;
      const uint8_t* from =
          tile.latent + token * kLatentBytes + piece_of_row(row, 4 * warp + block / 2) + block % 2 * 8;
      numbers[i] = *reinterpret_cast<const uint2*>(from);
      // byte nvfp4_scale(8 * warp + block) of the token's scales
      scales[i] =
          tile.scales[block % 4 / 2 * kScalePieces + token * kPieceBytes + block % 2 * 8 + 2 * warp + block / 4];
    }
  }

  // Four dims of four tokens, as operand A of two products. a and b are two tokens' words, c and d the others'.
  static __device__ void convert(uint32_t (&rows)[2][4], uint32_t a, uint32_t b, uint32_t c, uint32_t d, bool upper,
                                 const uint32_t (&scale)[2]) {
    // for four dims: the bytes of two tokens side by side
    const uint32_t select = upper ? 0x7362 : 0x5140;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t both = i ? __byte_perm(c, d, select) : __byte_perm(a, b, select);
      uint32_t even[2], odd[2];
      e4m3_to_f16(even_numbers(both), even);
      e4m3_to_f16(odd_numbers(both), odd);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        rows[k][2 * i] = times<Number::f16>(even[k], scale[i]);
        rows[k][2 * i + 1] = times<Number::f16>(odd[k], scale[i]);
      }
    }
  }

  static __device__ uint32_t pair_of_scales(uint32_t first, uint32_t second) {
    uint32_t pair[2];
    e4m3_to_f16(__byte_perm(first, second, 0x0040), pair);
    return pair[0];
  }

  // out += values times P, which lies in shared memory. `release` is called when the tile has been read. With kAhead,
  // bytes are read a step ahead: compute_scores() has read the first ones.
  template <typename Release>
  __device__ void add_values(float (&out)[kLaneDims / 2][kAccRegisters], Memory& s, int stage, uint32_t probs_address,
                             Release release) {
    uint2 others[4];
    uint32_t other_scales[4], scale[2];
    const auto numbers_of = [&](int step) -> uint2(&)[4] { return kAhead && step % 2 ? others : fp4; };
    const auto scales_of = [&](int step) -> uint32_t (&)[4] {
      return kAhead && step % 2 ? other_scales : value_scales;
    };
    const auto load_step = [&](int step) { load(numbers_of(step), scales_of(step), s.stages[stage], step); };
    Raw::add_in_steps(
        out, smem_descriptor_uniform(probs_address),
        [&](int step) {
          if constexpr (!kAhead) load_step(step);
          const uint32_t (&own)[4] = scales_of(step);
          scale[0] = pair_of_scales(own[0], own[1]), scale[1] = pair_of_scales(own[2], own[3]);
          if (kAhead && step + 1 < kValueSteps) load_step(step + 1);
          if (step + 1 == kValueSteps) release();
        },
        [&](uint32_t (&rows)[2][4], int step, int part) {
          const auto of = [&](const uint2& x) { return part < 2 ? x.x : x.y; };
          const uint2(&own)[4] = numbers_of(step);
          convert(rows, of(own[0]), of(own[1]), of(own[2]), of(own[3]), part % 2, scale);
        });
  }

  template <typename Shared>
  static __device__ void store_queries(const Queries& queries, float scale, Shared& s, int query, int head, int lane) {
    queries.store(scale, s.rows.q[query][0], s.q_scale[query], head, hidden(lane));
  }

  // Starts the copies of a warp's rows, `first` to `first + 7`. `own` is where row `at` lies.
  static __device__ void copy(Memory& s, int stage, int first, int at, const uint8_t* cache, uint32_t own,
                              uint32_t unit, int lane) {
    if constexpr (kHeads > 16) lane = hidden(lane);
    Stage& tile = s.stages[stage];
    const uint32_t latent =
        cast_smem_ptr_to_uint(tile.latent) + first * kLatentBytes + piece_of_row(lane / 16, lane % 16);
#pragma unroll
    for (int i = 0; i < kWarpRows; i += 2)
      copy_piece((latent ^ piece_of_row(i, 0)) + (i + lane / 16) * kLatentBytes, cache + lane % 16 * kPieceBytes,
                 __shfl_sync(~0u, own, i + lane / 16), unit);
    copy_piece(cast_smem_ptr_to_uint(tile.rope) + first * kRopeBytes + lane * kPieceBytes,
               cache + kNvfp4.rope_offset() + lane % 4 * kPieceBytes, __shfl_sync(~0u, own, lane / 4), unit);
    if (lane < 2 * kWarpRows)
      copy_piece(cast_smem_ptr_to_uint(tile.scales) + lane / kWarpRows * kScalePieces + at * kPieceBytes,
                 cache + kNvfp4.scale_offset() + lane / kWarpRows * kPieceBytes, own, unit);
    if (lane < kWarpRows) s.valid[stage][at] = own != kNoRow;
  }
};

}  // namespace mla::cuda::sm90::swap_ab
