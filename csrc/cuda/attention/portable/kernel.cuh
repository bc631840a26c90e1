// Attention for every GPU from sm_80 up: 16 heads per CTA, mma.sync, one tile in shared memory. It is meant to be right
// everywhere and simple. Several CTAs share a multiprocessor and hide each other's latency.
//
// A CTA takes its tokens one after the other. For each tile of up to 64 slots:
//   gather   one row per warp. e4m3 becomes bf16, exactly: without its scale, or times a scale that is a power of two
//   scores   8 tokens per warp: 16 x 576 by 576 x 8. A group's partial scores are multiplied by its scale
//   softmax  2 heads per warp, lanes over tokens
//   values   64 output dims per warp: 16 x 64 by 64 x 64. P is multiplied by the scale of the dims' group
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/portable/config.h"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/vector.cuh"
#include "mla/number.h"
#include "mla/problem.h"
#include "mla/softmax.h"

namespace mla::cuda::portable {

// kNumber: the type of queries, gathered rows and outputs.
template <Number kNumber>
struct Cta {
  using Atom = std::conditional_t<kNumber == Number::f16, cute::SM80_16x8x16_F32F16F16F32_TN,
                                  cute::SM80_16x8x16_F32BF16BF16F32_TN>;

  const AttentionProblem& p;
  Shared& s;
  int head_begin;
  int warp, lane;

  __device__ void load_q(int64_t token) const {
    const int pieces = p.head_dim() / 8;
    for (int i = threadIdx.x; i < kHeads * pieces; i += kThreads) {
      const int head = i / pieces, dim = i % pieces * 8;
      alignas(16) uint16_t piece[8] = {};
      if (head_begin + head < p.heads) {
        const uint16_t* from = dim < kLatent
                                   ? p.q_nope + p.offset(p.q_nope_strides, token, head_begin + head) + dim
                                   : p.q_rope + p.offset(p.q_rope_strides, token, head_begin + head) + dim - kLatent;
        if (reinterpret_cast<uintptr_t>(from) % 16 == 0)
          load_bytes<16, true>(from, piece);
        else
          load_bytes<16, false>(from, piece);
      }
      *reinterpret_cast<uint4*>(&s.q[head][dim]) = *reinterpret_cast<const uint4*>(piece);
    }
  }

  // Finds the addresses of a tile's rows. Tells all threads whether there is any row.
  __device__ bool find_rows(const SlotList& list, int64_t token, int begin, int count) const {
    bool found = false;
    if (threadIdx.x < kTile) {
      const int64_t slot = threadIdx.x < count ? list.slot(token, begin + threadIdx.x) : -1;
      found = list.cache.holds(slot);
      s.row[threadIdx.x] = found ? list.cache.row(slot) : nullptr;
      s.scales[threadIdx.x] = found ? list.cache.scales(slot) : nullptr;
    }
    return __syncthreads_or(found);
  }

  // Gathers rows of 16-bit numbers.
  template <bool kAligned>
  __device__ void gather_plain() const {
    const int pieces = p.head_dim() / 8;
    for (int t = warp; t < kTile; t += kWarps) {
      const uint8_t* row = s.row[t];
      for (int piece = lane; piece < pieces; piece += 32) {
        alignas(16) uint4 numbers = {};
        if (row) load_bytes<16, kAligned>(row + 16 * piece, &numbers);
        *reinterpret_cast<uint4*>(&s.rows[t][8 * piece]) = numbers;
      }
      if (lane < kGroups) s.scale[lane][t] = 1.0f;
    }
  }

  // Gathers e4m3 rows with scales that are powers of two, or with a scale per tensor (the caller's, not applied here),
  // and e2m1 rows. A lane takes eight numbers of a row, then eight more.
  __device__ void gather_with_powers(const CacheFormat& format) const {
    for (int t = warp; t < kTile; t += kWarps) {
      const uint8_t *row = s.row[t], *scales = s.scales[t];
      for (int dim = 8 * lane; dim < format.head_dim(); dim += 8 * 32) {
        alignas(16) uint32_t pairs[4] = {};
        const bool latent = dim < format.latent;
        if (row && !latent && format.rope_code != Code::e4m3) {
          memcpy(pairs, row + format.rope_offset() + 2 * (dim - format.latent), sizeof(pairs));
        } else if (row && latent && format.code == Code::e2m1) {
          const float scale = e4m3_to_float(scales[nvfp4_scale(dim / format.group)]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t two = row[dim / 2 + i];
            pairs[i] = pack_bf16(e2m1_to_float(two) * scale, e2m1_to_float(two >> 4) * scale);
          }
        } else if (row) {
          uint32_t bytes[2];
          memcpy(bytes, row + (latent ? dim : format.rope_offset() + dim - format.latent), sizeof(bytes));
          const float scale = latent && format.group ? ue8m0_to_float(scales[dim / format.group]) : 1.0f;
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            uint32_t exact[2];
            e4m3_to_bf16(bytes[w], exact);
#pragma unroll
            for (int i = 0; i < 2; ++i)
              pairs[2 * w + i] =
                  pack_bf16(bits_float(exact[i] << 16) * scale, bits_float(exact[i] & 0xffff0000u) * scale);
          }
        }
        *reinterpret_cast<uint4*>(&s.rows[t][dim]) = *reinterpret_cast<const uint4*>(pairs);
      }
      if (lane < kGroups) s.scale[lane][t] = 1.0f;
    }
  }

  // Gathers staged rows, rounded to bf16. A lane takes two numbers of a row, then two more.
  __device__ void gather_staged() const {
    for (int t = warp; t < kTile; t += kWarps) {
      const uint8_t* row = s.row[t];
      const float power = row ? two_to(static_cast<int8_t>(*s.scales[t])) : 0.0f;
      for (int dim = 2 * lane; dim < kHeadDim; dim += 2 * 32) {
        uint16_t two[2] = {};
        if (row) memcpy(two, row + 2 * dim, sizeof(two));
        const bool latent = dim < kLatent;
        const float factor = latent ? power * kUsualFactor : power;
        const auto value = [&](uint16_t bits) { return (latent ? f16_to_float(bits) : bf16_to_float(bits)) * factor; };
        *reinterpret_cast<uint32_t*>(&s.rows[t][dim]) = pack_bf16(value(two[0]), value(two[1]));
      }
      if (lane < kGroups) s.scale[lane][t] = 1.0f;
    }
  }

  template <bool kAligned>
  __device__ void gather_e4m3() const {
    constexpr int kRopePieces = kRope / 8;
    constexpr int kRowsAtOnce = 4;
    static_assert(kLatent == 32 * 16, "a lane has 16 fp8 bytes of a row");
    for (int first = warp; first < kTile; first += kWarps * kRowsAtOnce) {
      alignas(16) uint4 fp8[kRowsAtOnce] = {}, rest[kRowsAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const uint8_t* row = s.row[first + i * kWarps];
        if (!row) continue;
        load_bytes<16, kAligned>(row + 16 * lane, &fp8[i]);
        // after the fp8 bytes: scales, then rope
        if (lane <= kRopePieces) load_bytes<16, kAligned>(row + kFp8DsMla.scale_offset() + 16 * lane, &rest[i]);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int t = first + i * kWarps;
        const uint32_t words[4] = {fp8[i].x, fp8[i].y, fp8[i].z, fp8[i].w};
        alignas(16) uint32_t numbers[8];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          uint32_t pairs[2];
          e4m3_to_bf16(words[w], pairs);
          numbers[2 * w] = pairs[0], numbers[2 * w + 1] = pairs[1];
        }
        uint4* to = reinterpret_cast<uint4*>(&s.rows[t][16 * lane]);
        to[0] = *reinterpret_cast<const uint4*>(numbers), to[1] = *reinterpret_cast<const uint4*>(numbers + 4);
        if (lane == 0) {
          const float scales[4] = {__uint_as_float(rest[i].x), __uint_as_float(rest[i].y), __uint_as_float(rest[i].z),
                                   __uint_as_float(rest[i].w)};
#pragma unroll
          for (int g = 0; g < kGroups; ++g) s.scale[g][t] = scales[g];
        } else if (lane <= kRopePieces) {
          *reinterpret_cast<uint4*>(&s.rows[t][kLatent + 8 * (lane - 1)]) = rest[i];
        }
      }
    }
  }

  // scores[head][token] of the warp's 8 tokens, to base 2. `slots` counts the list's slots from the tile's first one
  // on. Heads of earlier queries do not see the last ones.
  __device__ void score(int slots) const {
    const int column = warp * kWarpTokens + 2 * (lane % 4);  // a lane's two tokens
    float sum[4] = {};
    const uint32_t q_address = cast_smem_ptr_to_uint(&s.q[lane % 16][8 * (lane / 16)]);
    const uint32_t row_address = cast_smem_ptr_to_uint(&s.rows[warp * kWarpTokens + lane % 8][8 * (lane / 8)]);
#pragma unroll 1
    for (int part = 0; part <= kGroups; ++part) {
      const int steps = (part < kGroups ? kGroupDims : p.head_dim() - kLatent) / 32;
      float partial[4] = {};
      for (int step = 0; step < steps; ++step) {
        const int dim = part * kGroupDims + 32 * step;
        uint32_t rows[4], q0[4], q1[4];
        load_tiles(rows, row_address + 2 * dim);
        load_tiles(q0, q_address + 2 * dim);
        load_tiles(q1, q_address + 2 * dim + 32);
        mma<Atom>(partial, q0, rows[0], rows[1]);
        mma<Atom>(partial, q1, rows[2], rows[3]);
      }
      const float first = part < kGroups ? s.scale[part][column] : 1.0f,
                  second = part < kGroups ? s.scale[part][column + 1] : 1.0f;
      sum[0] += partial[0] * first, sum[1] += partial[1] * second;
      sum[2] += partial[2] * first, sum[3] += partial[3] * second;
    }
    const float scale = p.scale * kLog2E;
    const bool first_valid = s.row[column] != nullptr, second_valid = s.row[column + 1] != nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = lane / 4 + 8 * half, seen = slots - p.unseen(head_begin + head);
      float2 pair;
      pair.x = first_valid && column < seen ? sum[2 * half] * scale : -INFINITY;
      pair.y = second_valid && column + 1 < seen ? sum[2 * half + 1] * scale : -INFINITY;
      *reinterpret_cast<float2*>(&s.scores[head][column]) = pair;
    }
  }

  __device__ void softmax() const {
#pragma unroll
    for (int i = 0; i < kHeads / kWarps; ++i) {
      const int head = warp * (kHeads / kWarps) + i;
      const float a = s.scores[head][lane], b = s.scores[head][lane + 32];
      float row_max = fmaxf(a, b);
      for (int distance = 16; distance > 0; distance /= 2)
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, distance));
      const float before = s.row_max[head];
      row_max = fmaxf(row_max, before);
      const float finite_max = row_max == -INFINITY ? 0.0f : row_max;
      const float wa = exp2f(a - finite_max), wb = exp2f(b - finite_max);
      float total = wa + wb;
      for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
      s.scores[head][lane] = wa, s.scores[head][lane + 32] = wb;
      __syncwarp();
      if (lane == 0) {
        const float rescale = exp2f(before - finite_max);
        s.row_max[head] = row_max;
        s.rescale[head] = rescale;
        s.total[head] = s.total[head] * rescale + total;
      }
    }
  }

  // out[8-dim tile][lane's 4 numbers]: heads lane / 4 and that plus 8, dims 2 * (lane % 4) and the next.
  __device__ void add_values(float (&out)[kWarpDims / 8][4]) const {
    const float upper = s.rescale[lane / 4], lower = s.rescale[lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; ++n)
      out[n][0] *= upper, out[n][1] *= upper, out[n][2] *= lower, out[n][3] *= lower;
    const int first_dim = warp * kWarpDims;
    const float* scale = s.scale[first_dim / kGroupDims];
    static_assert(kGroupDims % kWarpDims == 0, "a warp's dims have one scale");
#pragma unroll
    for (int k = 0; k < kTile; k += 16) {
      uint32_t probs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = lane / 4 + 8 * (i % 2), token = k + 2 * (lane % 4) + 8 * (i / 2);
        const float2 pair = *reinterpret_cast<const float2*>(&s.scores[head][token]);
        const float2 scales = *reinterpret_cast<const float2*>(&scale[token]);
        // of a missing row P is 0, and it holds zeros
        probs[i] = pack<kNumber>(pair.x * scales.x, pair.y * scales.y);
      }
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; n += 2) {
        uint32_t values[4];
        load_tiles_transposed(values, cast_smem_ptr_to_uint(&s.rows[k + lane % 16][first_dim + 8 * (n + lane / 16)]));
        mma<Atom>(out[n], probs, values[0], values[1]);
        mma<Atom>(out[n + 1], probs, values[2], values[3]);
      }
    }
  }

  static __device__ uint16_t narrow(float x) { return kNumber == Number::f16 ? float_to_f16(x) : float_to_bf16(x); }

  // Writes the CTA's heads of a token: to the output, or as partial result number `partial`.
  __device__ void finish(int64_t token, bool whole, int64_t partial, const float (&out)[kWarpDims / 8][4]) const {
    const Partials partials(p.workspace, p.ctas, p.heads);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = lane / 4 + 8 * half, head = head_begin + own;
      if (head >= p.heads) continue;
      const float total = s.total[own], row_max = s.row_max[own] * kLn2;
      const float lse = lse_of(row_max, total);
      float factor = inverse_of(total);
      factor *= p.value_scale;
      const int64_t row = partials.row(partial, head);
      if (whole) factor = with_sink(factor, p, head, lse);
      for (int n = 0; n < kWarpDims / 8; ++n) {
        const int dim = warp * kWarpDims + 8 * n + 2 * (lane % 4);
        const float first = total == 0.0f ? 0.0f : out[n][2 * half] * factor;
        const float second = total == 0.0f ? 0.0f : out[n][2 * half + 1] * factor;
        if (whole) {
          uint16_t* to = p.out + p.offset(p.out_strides, token, head) + dim;
          to[0] = narrow(first), to[1] = narrow(second);
        } else {
          *reinterpret_cast<float2*>(partials.out + row * kValueDim + dim) = {first, second};
        }
      }
      if (warp > 0 || lane % 4 > 0) continue;
      if (whole) {
        p.lse[p.offset(p.lse_strides, token, head)] = lse;
        if (p.max_logits) p.max_logits[p.offset(p.max_strides, token, head)] = max_logit_of(lse, row_max);
      } else {
        partials.lse[row] = lse;
        partials.max_logits[row] = row_max;
      }
    }
  }
};

// blockIdx.x: a group of heads, y: the plan's entry.
template <Number kNumber>
__global__ void __launch_bounds__(kThreads, kCtasPerProcessor)
    attention_kernel(const __grid_constant__ AttentionProblem p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const Cta<kNumber> cta{p, s, static_cast<int>(blockIdx.x) * kHeads, static_cast<int>(threadIdx.x) / 32,
                         static_cast<int>(threadIdx.x) % 32};

  // The plan may be a caller's, and stale: nothing in it is trusted to be within the problem.
  const PlanEntry entry = p.plan[blockIdx.y];
  const int tile_slots = min(max(entry.tile_slots, 1), kTile);
  const int token_end = min(entry.token_end, p.tokens);
  for (int token = max(entry.token_begin, 0); token < token_end; ++token) {
    const int length = clamp_length(p.lists[0].length, token, p.lists[0].topk);
    const int extra_length = p.list_count > 1 ? clamp_length(p.lists[1].length, token, p.lists[1].topk) : 0;
    const int main_tiles = tiles_of(length, tile_slots), tiles = main_tiles + tiles_of(extra_length, tile_slots);
    const int tile_begin = token == entry.token_begin ? max(entry.tile_begin, 0) : 0;
    const int tile_end = token == entry.token_end - 1 ? min(entry.tile_end, tiles) : tiles;

    __syncthreads();  // the token before no longer needs shared memory
    cta.load_q(token);
    if (threadIdx.x < kHeads) s.row_max[threadIdx.x] = -INFINITY, s.total[threadIdx.x] = 0.0f;
    float out[kWarpDims / 8][4] = {};
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      const bool in_main = tile < main_tiles;
      const SlotList& list = p.lists[in_main ? 0 : 1];
      const int begin = (in_main ? tile : tile - main_tiles) * tile_slots;
      const int slots = (in_main ? length : extra_length) - begin;  // from here to the list's end
      __syncthreads();                                              // the tile before no longer needs the rows
      if (!cta.find_rows(list, token, begin, min(tile_slots, slots))) continue;
      const bool aligned = rows_aligned16(list.cache);
      const CacheFormat& format = list.cache.format;
      if (format.scale == Scale::fp32)
        aligned ? cta.template gather_e4m3<true>() : cta.template gather_e4m3<false>();
      else if (format.quantised())
        cta.gather_with_powers(format);
      else if (format.scale == Scale::power)
        cta.gather_staged();
      else
        aligned ? cta.template gather_plain<true>() : cta.template gather_plain<false>();
      __syncthreads();
      cta.score(slots);
      __syncthreads();
      cta.softmax();
      __syncthreads();
      cta.add_values(out);
    }
    __syncthreads();
    const bool whole = tile_begin == 0 && tile_end == tiles;
    cta.finish(token, whole, tile_begin > 0 ? entry.partial : begun_partial(entry), out);
  }
}

}  // namespace mla::cuda::portable
