// fp8_ds_mla rows for up to 32 heads, and fp8_tensor_576 rows for up to 16. Shared memory holds raw cache rows.
//
// Scores are fp8 products. A query is the sum of two e4m3 numbers, which take two columns of wgmma. The accumulators of
// a group of 128 dims are multiplied by the token's scale, if any, in fp32. Values are converted to f16 in registers,
// scales included, just before their product. So no f16 copy of a tile is written, and four tiles fit in flight.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/swap_ab/raw_rows.cuh"
#include "cuda/attention/sm90/quantised_queries.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::swap_ab {

// Eight lanes of Fp8Rows::load() read two pieces of every other row.
static_assert(lanes_in_different_banks([](int lane) { return 2 * (lane % 4); }, [](int lane) { return lane / 4; }));

template <Rows kRows, int kHeads>
struct Fp8Rows : RawRows<Fp8Rows<kRows, kHeads>, kHeads> {
  using Raw = RawRows<Fp8Rows, kHeads>;
  using Raw::kGroupDims, Raw::kLaneDims, Raw::kValueSteps, Raw::kWarpRows, Raw::lane, Raw::warp;
  // One scale for the whole cache: it is part of the factors of scores and outputs. Rope is e4m3, too.
  static constexpr bool kOfTensor = kRows == Rows::fp8_tensor_576;
  using Queries = QuantisedQueries<kHeads, kOfTensor>;
  static constexpr int kStages = 4;                     // tiles
  static constexpr int kQueries = kHeads > 16 ? 1 : 2;  // buffers for a token's queries
  static constexpr int kAccRegisters = kHeads / 2;
  static constexpr bool kAhead = kHeads <= 16;  // read values a step ahead; else registers are too few

  struct Stage {
    SwizzledRows<kTileTokens> fp8[kGroups];  // a token's 128 dims are a row of 128 bytes
    SwizzledRows<kTileTokens> rope;          // rows of 128 bytes too; e4m3 fills half of them
  };
  struct Memory {
    alignas(1024) Stage stages[kStages];
    alignas(1024) uint8_t q[kQueries][kGroups][Queries::kGroupBytes];  // e4m3: heads, then their rounding errors
    alignas(1024) uint8_t q_rope[kQueries][Queries::kRopeBytes];
    alignas(16) std::conditional_t<kOfTensor, Empty, float[kStages][kTileTokens][kGroups]> scale;
    uint8_t valid[kStages][kTileTokens];  // whether the slot is one

    __device__ void* reduction_buffer(int stage) { return &stages[stage]; }
  };
  static constexpr bool kReducesInTile = true;

  // f16 may not hold a scale. So a token's scales are divided by a power of two above the largest one, and its P
  // is multiplied by it.
  int power[2];          // its log2, for the lane's two tokens
  uint32_t value_scale;  // f16 scales, so divided, of tokens 2 * lane and the next, for the warp's group
  uint4 fp8[4];          // the first values of the next product

  __device__ float lift(int half) const { return kOfTensor ? 0.0f : static_cast<float>(power[half]); }

  static __device__ int power_of(const float4& x) {
    return power_above(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
  }
  static __device__ float two_to(int power) { return __uint_as_float((127 + power) << 23); }

  // The scores of a tile's tokens 16 * warp + lane / 4 and that plus 8, in the order of wgmma's accumulators.
  __device__ void compute_scores(float (&score)[kAccRegisters], Memory& s, int stage, int query, const float* q_scale) {
    const uint64_t k = smem_descriptor(cast_smem_ptr_to_uint(&s.stages[stage])),
                   q = smem_descriptor(cast_smem_ptr_to_uint(s.q[query])),
                   q_rope = smem_descriptor(cast_smem_ptr_to_uint(s.q_rope[query]));
    // groups whose accumulators fit into registers
    constexpr int kAtOnce = kHeads > 16 ? 1 : kHeads > 8 ? 3 - kOfTensor : 4;
    float part[kAtOnce][2 * kAccRegisters];
    const auto begin_group = [&](int g) {
      float (&acc)[2 * kAccRegisters] = part[g % kAtOnce];
#pragma unroll
      for (int step = 0; step < 4; ++step)
        wgmma<E4m3Atom<2 * kHeads>>(acc, k + ((g * kTileTokens * kRowBytes + step * 32) >> 4),
                                    q + ((g * Queries::kGroupBytes + step * 32) >> 4), step > 0);
      if constexpr (kOfTensor) {
        if (g == 0) add_rope<E4m3Atom<2 * kHeads>, 2>(acc, k, q_rope, true);
      }
      cute::warpgroup_commit_batch();
    };
    // loaded before the products, which occupy shared memory
    float4 scale[2], value_scales[2];
    bool valid[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = warp * 16 + lane / 4 + 8 * i;
      scale[i] = scales_of(s, stage, token);
      valid[i] = s.valid[stage][token];
      value_scales[i] = scales_of(s, stage, 2 * lane + (i ^ swap()));
    }
    if constexpr (!kOfTensor) fence_acc(score);
    cute::warpgroup_arrive();
    if constexpr (!kOfTensor) {
      add_rope<Bf16Atom<kHeads, Major::K, Major::K>, 4>(score, k, q_rope, false);
      cute::warpgroup_commit_batch();
    }
    if constexpr (kAtOnce > 1) {
#pragma unroll
      for (int g = 0; g < kAtOnce; ++g) begin_group(g);
    }
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      power[i] = power_of(scale[i]);
      bias[i] = valid[i] ? 0.0f : -INFINITY;
    }
    find_value_scale(value_scales);
    // A group is added while the products of the next ones are in flight.
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (const int next = g - 1 + kAtOnce; (g > 0 || kAtOnce == 1) && next < kGroups) {
        cute::warpgroup_arrive();
        begin_group(next);
      }
      wait_for_all_products_but(min(kAtOnce, kGroups - g) - 1);
      if (!kOfTensor && g == 0) fence_acc(score);
      float (&acc)[2 * kAccRegisters] = part[g % kAtOnce];
      fence_acc(acc);
#pragma unroll
      for (int i = 0; i < kAccRegisters; ++i) {
        const float4& x = scale[i / 2 % 2];
        const float group = (acc[i] + acc[i + kAccRegisters]) * (g == 0 ? x.x : g == 1 ? x.y : g == 2 ? x.z : x.w);
        score[i] = kOfTensor && g == 0 ? group : score[i] + group;
      }
    }
    scale_scores(score, score, q_scale, bias, lane);
    if constexpr (kAhead) load(fp8, s.stages[stage], 0);
  }

  static __device__ float4 scales_of(const Memory& s, int stage, int token) {
    if constexpr (kOfTensor)
      return {1.0f, 1.0f, 1.0f, 1.0f};
    else
      return *reinterpret_cast<const float4*>(s.scale[stage][token]);
  }

  // Adds the product of rope, in kSteps steps.
  template <typename Atom, int kSteps, int kCount>
  static __device__ void add_rope(float (&acc)[kCount], uint64_t k, uint64_t q_rope, bool add) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      wgmma<Atom>(acc, k + ((kGroups * kTileTokens * kRowBytes + step * 32) >> 4), q_rope + ((step * 32) >> 4),
                  add || step > 0);
  }

  // Every other four lanes load their two tokens' scales in reverse, so that eight lanes read different banks.
  __device__ int swap() const { return lane / 4 % 2; }

  __device__ void find_value_scale(const float4 (&scales)[2]) {
    float own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4& x = scales[i];
      own[i] = (warp == 0 ? x.x : warp == 1 ? x.y : warp == 2 ? x.z : x.w) * two_to(-power_of(x));
    }
    value_scale = swap() ? pack_f16(own[1], own[0]) : pack_f16(own[0], own[1]);
  }

  // Two heads' P of the lane's upper or lower token, as operand B has them.
  __device__ uint32_t pack(float first, float second, int half) const {
    const float up = kOfTensor ? 1.0f : two_to(power[half]);
    return pack_f16(first * up, second * up);
  }

  // The lane's 16 fp8 bytes of each of four tokens: 16 * step + 2 * (lane % 4), the next, and both plus 8.
  __device__ void load(uint4 (&fp8)[4], const Stage& rows, int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 2 * (lane % 4) + i % 2;  // of eight
      fp8[i] = load_piece(rows.fp8[warp].address() + (16 * step + 8 * (i / 2) + row) * kRowBytes +
                          offset_in_row(row, lane / 4));
    }
  }

  static __device__ uint32_t scaled(uint32_t numbers, uint32_t scale) {
    return kOfTensor ? numbers : times<Number::f16>(numbers, scale);
  }

  // Four dims of these tokens, as operand A of two products.
  static __device__ void convert(uint32_t (&rows)[2][4], uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                 const uint32_t (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // for two dims: the bytes of two tokens side by side
      const uint32_t first = __byte_perm(a, b, i ? 0x7362 : 0x5140), second = __byte_perm(c, d, i ? 0x7362 : 0x5140);
      const uint4 numbers = e4m3_to_f16(first, second);
      rows[i][0] = scaled(numbers.x, scale[0]), rows[i][1] = scaled(numbers.y, scale[0]);
      rows[i][2] = scaled(numbers.z, scale[1]), rows[i][3] = scaled(numbers.w, scale[1]);
    }
  }

  // out += values times P, which lies in shared memory. `release` is called when the tile has been read. With kAhead,
  // bytes are read a step ahead: compute_scores() has read the first ones.
  template <typename Release>
  __device__ void add_values(float (&out)[kLaneDims / 2][kAccRegisters], Memory& s, int stage, uint32_t probs_address,
                             Release release) {
    uint4 others[4];
    uint32_t scale[2] = {};
    const auto of_step = [&](int step) -> uint4(&)[4] { return kAhead && step % 2 ? others : fp8; };
    Raw::add_in_steps(
        out, smem_descriptor(probs_address),
        [&](int step) {
          if constexpr (!kAhead) load(fp8, s.stages[stage], step);
          if (kAhead && step + 1 < kValueSteps) load(of_step(step + 1), s.stages[stage], step + 1);
          if constexpr (!kOfTensor) {
            scale[0] = __shfl_sync(~0u, value_scale, 8 * step + lane % 4);
            scale[1] = __shfl_sync(~0u, value_scale, 8 * step + 4 + lane % 4);
          }
          if (step + 1 == kValueSteps) release();
        },
        [&](uint32_t (&rows)[2][4], int step, int word) {
          const auto of = [&](const uint4& x) { return word == 0 ? x.x : word == 1 ? x.y : word == 2 ? x.z : x.w; };
          const uint4(&own)[4] = of_step(step);
          convert(rows, of(own[0]), of(own[1]), of(own[2]), of(own[3]), scale);
        });
  }

  template <typename Shared>
  static __device__ void store_queries(const Queries& queries, float scale, Shared& s, int query, int head, int lane) {
    queries.store(scale, s.rows.q[query][0], s.rows.q_rope[query], s.q_scale[query], head, lane);
  }

  // Starts the copies of a warp's rows, `first` to `first + 7`. `own` is where row `at` lies.
  static __device__ void copy(Memory& s, int stage, int first, int at, const uint8_t* cache, uint32_t own,
                              uint32_t unit, int lane) {
    const uint32_t fp8 = s.stages[stage].fp8[lane / 8].address() + first * kRowBytes + lane % 8 * kPieceBytes;
// not all at once: consumers' reads of shared memory wait in the same queue
#pragma unroll 2
    for (int i = 0; i < kWarpRows; ++i)
      copy_piece(rows_further(fp8, i), cache + kPieceBytes * lane, __shfl_sync(~0u, own, i), unit);
    copy_rope(s.stages[stage].rope.address() + first * kRowBytes, cache, own, unit, lane);
    if (lane >= kWarpRows) return;
    if constexpr (!kOfTensor)
      copy_piece(cast_smem_ptr_to_uint(s.scale[stage][at]), cache + kFp8DsMla.scale_offset(), own, unit);
    s.valid[stage][at] = own != kNoRow;
  }

  static __device__ void copy_rope(uint32_t to, const uint8_t* cache, uint32_t own, uint32_t unit, int lane) {
    constexpr int kPieces = kOfTensor ? 4 : 8, kAtOnce = 32 / kPieces;  // rows
    constexpr int kOffset = kOfTensor ? kFp8Tensor576.rope_offset() : kFp8DsMla.rope_offset();
    const int piece = lane % kPieces;
#pragma unroll
    for (int i = 0; i < kWarpRows; i += kAtOnce) {
      const int row = i + lane / kPieces;
      copy_piece(to + row * kRowBytes + offset_in_row(row, piece), cache + kOffset + kPieceBytes * piece,
                 __shfl_sync(~0u, own, row), unit);
    }
  }
};

}  // namespace mla::cuda::sm90::swap_ab
