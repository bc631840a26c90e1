// Values, by two warpgroups with 256 dims each. Dims are the rows of wgmma and heads its columns:
//
//   O^T [256 dims x 32 heads] += V^T [256 x 64 tokens] P^T
//
// V^T comes from registers: a lane reads eight neighbouring codes of a token and turns them into f16 on the way, so no
// f16 tile is ever written. Rows of wgmma are dims in an order of our own: a lane's eight rows are these eight.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/cursor.cuh"
#include "cuda/attention/sm90/some_heads/config.h"
#include "cuda/attention/work.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::some_heads {

struct Adder {
  static constexpr int kLaneDims = 8;
  static constexpr int kProducts = kLaneDims / 2;  // of wgmma for 16 tokens: a lane has two rows of each
  static constexpr int kSums = kHeads / 2;         // a lane's, of a product

  const AttentionProblem& p;
  Shared& s;
  const int head_begin;
  const int group, warp, lane;  // left or right half of the dims; warp of the warpgroup

  // Dims dim() + 2 * i and the next; heads 8 * j + 2 * (lane % 4) and the next:
  // out[i][4 * j + 2 * (dim % 2) + head % 2].
  float out[kProducts][kSums];

  __device__ int dim() const { return 256 * group + 64 * warp + kLaneDims * (lane / 4); }

  // The lane's codes of tokens 16 * step + 2 * (lane % 4), the next, and both again 8 further on.
  __device__ void load(uint2 (&codes)[4], int stage, int step) const {
    const int piece = dim() % 128 / kPieceBytes;
    const uint32_t from = shared_address(s.codes[stage][dim() / 128]) + dim() % kPieceBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 2 * (lane % 4) + i % 2;  // of eight
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(codes[i].x), "=r"(codes[i].y)
                   : "r"(from + (16 * step + 8 * (i / 2) + row) * kRowBytes + (piece ^ row) * kPieceBytes)
                   : "memory");
    }
  }

  // Four dims of these tokens as two products' rows: those of words x, or of words y.
  __device__ static void convert(uint32_t (&rows)[2][4], uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                 const uint32_t (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // codes of a dim from two tokens next to each other, for two dims
      const uint32_t first = __byte_perm(a, b, i ? 0x7362 : 0x5140), second = __byte_perm(c, d, i ? 0x7362 : 0x5140);
      const uint4 numbers = e4m3_to_f16(first, second);
      rows[i][0] = times<Number::f16>(numbers.x, scale[0]), rows[i][1] = times<Number::f16>(numbers.y, scale[0]);
      rows[i][2] = times<Number::f16>(numbers.z, scale[1]), rows[i][3] = times<Number::f16>(numbers.w, scale[1]);
    }
  }

  __device__ void add(int stage, int at) {
    const uint64_t weights = describe_atoms(shared_address(s.weights[at]));
    uint32_t rows[2][4];
#pragma unroll
    for (int step = 0; step < kTileTokens / 16; ++step) {
      uint2 codes[4];
      load(codes, stage, step);
      const uint32_t* scales = &s.value_scale[stage][dim() / 128][8 * step + lane % 4];
      const uint32_t scale[2] = {scales[0], scales[4]};
      if (step == kTileTokens / 16 - 1) arrive_as_warp(s.empty[stage]);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (step > 0 || side > 0) wait_for_products();
        if (side == 0)
          convert(rows, codes[0].x, codes[1].x, codes[2].x, codes[3].x, scale);
        else
          convert(rows, codes[0].y, codes[1].y, codes[2].y, codes[3].y, scale);
        begin_products();
        multiply_rows(out[2 * side], rows[0], weights + ((step * 32) >> 4));
        multiply_rows(out[2 * side + 1], rows[1], weights + ((step * 32) >> 4));
        end_products();
      }
    }
    wait_for_products();
  }

  __device__ void change() {
#pragma unroll
    for (int i = 0; i < kProducts; ++i) sums_change(out[i]);
  }

  __device__ void rescale(int at) {
    if (!s.raised[at]) return;
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&s.rescale[at][8 * j + 2 * (lane % 4)]);
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) out[i][4 * j + 2 * half] *= by.x, out[i][4 * j + 2 * half + 1] *= by.y;
    }
  }

  __device__ void write(const TokenWork& work, int64_t place, int at) const {
    const Partials partials(p.workspace, p.workers, p.heads);
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int head = 8 * j + 2 * (lane % 4) + c, own = head_begin + head;
        if (own >= p.heads) continue;
        const float by = s.rescale[at][head];
        float dims[kLaneDims];
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) dims[i] = out[i / 2][4 * j + 2 * (i % 2) + c] * by;
        if (work.whole()) {
          *reinterpret_cast<uint4*>(p.out + work.token * p.out_token + own * p.out_head + dim()) = {
              pack_bf16(dims[0], dims[1]), pack_bf16(dims[2], dims[3]), pack_bf16(dims[4], dims[5]),
              pack_bf16(dims[6], dims[7])};
        } else {
          float4* to = reinterpret_cast<float4*>(partials.out + partials.row(place, own) * kValueDim + dim());
          to[0] = {dims[0], dims[1], dims[2], dims[3]};
          to[1] = {dims[4], dims[5], dims[6], dims[7]};
        }
      }
  }

  // What the worker has to do is asked for again at a token's end: there are no registers to remember it.
  __device__ void run(int index) {
    int tile = 0, handed = 0;
    for (int token = Worker(p, index, kTileTokens).token_begin;;) {
      int tiles;
      {
        const Worker worker(p, index, kTileTokens);
        if (token >= worker.token_end) break;
        const TokenWork work = worker.work(token);
        tiles = work.tile_end - work.tile_begin;
      }
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int j = 0; j < kSums; ++j) out[i][j] = 0.0f;
      for (; tiles > 0; --tiles, ++tile, ++handed) {
        const int at = handed % kWeights;
        wait(s.weights_full[at], handed / kWeights % 2);
        rescale(at);
        change();
        add(tile % kStages, at);
        change();
        arrive_as_warp(s.weights_empty[at]);
      }
      const int at = handed % kWeights;
      wait(s.weights_full[at], handed / kWeights % 2);
      ++handed;
      const Worker worker(p, index, kTileTokens);
      const TokenWork work = worker.work(token);
      write(work, worker.place(work), at);
      arrive_as_warp(s.weights_empty[at]);
      ++token;
    }
  }
};

}  // namespace mla::cuda::sm90::some_heads
