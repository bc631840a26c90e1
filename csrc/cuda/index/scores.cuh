// How well keys fit tokens: the sum over heads of weight times relu(query . key), by mma.sync, on any GPU from sm_80
// up.
//
// A warp keeps the queries of up to 64 rows in registers (rows are heads: of one token, or of two with up to 32 heads)
// and multiplies them with strips of 16 keys, 64 m16n8k16 a strip. relu, the weight and the sum over heads follow in
// registers. Two ways to come by strips, chosen for each group of neighbouring tokens:
//
//   keys of one token   a warp's strips are its own: from the ring to registers, no barrier. Bound by memory
//   shared keys         each warp converts one of four strips for all four, in shared memory, and multiplies all of
//                       them with its own tokens. Bound by mma.sync
//
// A score's bits do not depend on which: dims, heads and lanes are summed up in the same order.
//
// More than 64 heads go through the keys of one token 64 at a time, their queries come from shared memory each time.
#pragma once

#include <cstdint>

#include "cuda/index/keys.cuh"
#include "cuda/index/work.cuh"

namespace mla::cuda::index {

// sum[16 x 8] += a[16 x 16] b[16 x 8] in f16. Ours, as CuTe's is volatile: for sm_100 and sm_120 that costs registers,
// one kernel's are spilled.
__device__ __forceinline__ void mma_f16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <KeyNumber kKeys, int kPasses>
struct Shared {
  static constexpr int kRows = 16 * kRowTiles * kPasses;
  using PerWarp = uint4[kSides][kSteps / 2][32];
  union {
    QueryRow queries[kRows];
    PerWarp keys[2][kWarps];  // a converted unit and the next one, as lanes want them
  };
  float weight[kRows];
  float factor[2][kUnit];
  KeyRing<kKeys> ring[kWarps];
  SharedShare share;
};

// kTokenTiles: tiles of 16 heads that a token has in one pass. kPasses: how often, 1 or 2.
template <KeyNumber kKeys, int kTokenTiles, int kPasses, bool kAligned>
struct Scorer {
  static constexpr int kWarpTokens = kRowTiles / kTokenTiles;  // of a warp, where keys are shared
  static constexpr int kGroup = kPasses > 1 ? 1 : kWarps * kWarpTokens;
  static constexpr int kTokenRows = 16 * kTokenTiles * kPasses;

  const Problem& p;
  Shared<kKeys, kPasses>& s;
  int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;

  // The rows that a warp multiplies with.
  struct Rows {
    uint32_t a[kRowTiles][kSteps][4];
    float weight[kRowTiles][2];  // of rows lane / 4 and 8 more
  };

  using Products = float[kRowTiles][kSides][4];
  using Sums = float[kSides][2];  // of keys 2 * (lane % 4) and the next of each side

  template <int kTiles>
  __device__ static void multiply(const Rows& rows, const uint32_t (&b)[kSides][2 * kSteps], Products& products) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int side = 0; side < kSides; ++side)
#pragma unroll
        for (int i = 0; i < 4; ++i) products[tile][side][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int side = 0; side < kSides; ++side)
          mma_f16(products[tile][side], rows.a[tile][step], b[side][2 * step], b[side][2 * step + 1]);
  }

  // Adds what a lane has of a token's heads.
  __device__ static void weigh(const Rows& rows, const Products& products, int first_tile, Sums& sums) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int side = 0; side < kSides; ++side)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            sums[side][i] = fmaf(rows.weight[first_tile + tile][half],
                                 relu(products[first_tile + tile][side][2 * half + i]), sums[side][i]);
  }

  // Adds up the lanes' parts. A lane gets the score, but for the key's factor, of key_of_lane() and, of several tokens,
  // of number lane / 4 % kTokens.
  template <int kTokens>
  __device__ float add_lanes(const Sums (&sums)[kTokens]) const {
    static_assert(kTokens == 1 || kTokens == 2);
    const bool second_key = lane & 16, second_side = lane & 8, second_token = lane & 4;
    float token_sum[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      float side_sum[kSides];
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
        const Sums& own = sums[token];
        const float given = second_key ? own[side][0] : own[side][1];
        side_sum[side] = (second_key ? own[side][1] : own[side][0]) + __shfl_xor_sync(~0u, given, 16);
      }
      const float given = second_side ? side_sum[0] : side_sum[1];
      token_sum[token] = (second_side ? side_sum[1] : side_sum[0]) + __shfl_xor_sync(~0u, given, 8);
    }
    const float given = kTokens == 1 || second_token ? token_sum[0] : token_sum[kTokens - 1];
    return (second_token ? token_sum[kTokens - 1] : token_sum[0]) + __shfl_xor_sync(~0u, given, 4);
  }

  __device__ int key_of_lane() const { return (lane & 8) + lane % 4 * 2 + lane / 16; }

  __device__ void store(int64_t token, uint32_t length, uint32_t key, float sum, float factor) const {
    if (key < length) p.scores[token * p.score_token + key] = factor < 0.0f ? -INFINITY : __fmul_rn(sum, factor);
  }

  // Units begin <= i < end of one token's keys.
  __device__ void score_token(int64_t token, int32_t begin, int32_t end) {
    const uint32_t length = p.length_of(token), first = begin * uint32_t{kUnit} + warp * kStrip;
    const uint32_t stop = min(end * uint32_t{kUnit}, length);
    KeyReader<kKeys, kAligned> reader(p, s.ring[warp], token, stop);
    reader.begin(first, stop);

    __syncthreads();  // all are finished with the queries or keys before
#pragma unroll 1
    for (int row = 0; row < kTokenRows; row += 8 * kWarps)
      stage_queries<kKeys, 8>(p, token, row + warp, kWarps, s.queries + row + warp, s.weight + row + warp);
    __syncthreads();

    Rows rows;
    const auto load_rows = [&](int pass) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const int row = 16 * (pass * kTokenTiles + tile);
        load_queries(s.queries + row, s.weight + row, rows.a[tile], rows.weight[tile]);
      }
    };
    if constexpr (kPasses == 1) load_rows(0);

    int stage = 0;
#pragma unroll 1
    for (uint32_t strip = first; strip < stop; strip += kUnit) {
      Strip keys;
      reader.next(strip, stop, stage, keys);
      stage = (stage + 1) % KeyRing<kKeys>::kStages;
      Sums sums[1] = {};
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        if constexpr (kPasses > 1) load_rows(pass);
        Products products;
        multiply<kTokenTiles>(rows, keys.b, products);
        weigh(rows, products, 0, sums[0]);
      }
      const float sum = add_lanes<1>(sums);
      // the factor is with the lanes of the key's own column
      const int from = key_of_lane() % 8 * 4;
      const float first_side = __shfl_sync(~0u, keys.factor[0], from);
      const float second_side = __shfl_sync(~0u, keys.factor[1], from);
      if (!(lane & 4)) store(token, length, strip + key_of_lane(), sum, lane & 8 ? second_side : first_side);
    }
  }

  // Units begin <= i < end of a group whose tokens share keys.
  __device__ void score_group(const Group<kGroup>& group, int32_t begin, int32_t end) {
    const int64_t first_token = group.first + warp * kWarpTokens;
    uint32_t length[kWarpTokens], longest = 0;
#pragma unroll
    for (int i = 0; i < kWarpTokens; ++i) {
      length[i] = first_token + i < p.tokens ? p.length_of(first_token + i) : 0;
      longest = max(longest, length[i]);
    }
    const uint32_t own = warp * kStrip, stop = min(end * uint32_t{kUnit}, static_cast<uint32_t>(group.longest));
    KeyReader<kKeys, kAligned> reader(p, s.ring[warp], group.first, stop);
    reader.begin(begin * uint32_t{kUnit} + own, stop);

    __syncthreads();  // all are finished with the queries or keys before
    Rows rows = {};   // loaded in a loop: without a first value they would occupy registers before it, too
    const int staged = 16 * warp;
#pragma unroll 1
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int64_t token = min(first_token + tile / kTokenTiles, p.tokens - 1);  // one too many is not stored
#pragma unroll 1
      for (int row = 0; row < 16; row += 8)
        stage_queries<kKeys, 8>(p, token, tile % kTokenTiles * 16 + row, 1, s.queries + staged + row,
                                s.weight + staged + row);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)  // registers have no index
        if (i == tile) load_queries(s.queries + staged, s.weight + staged, rows.a[i], rows.weight[i]);
      __syncwarp();
    }
    __syncthreads();  // keys overwrite queries

    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int32_t unit = begin; unit < end; ++unit, buffer ^= 1) {
      {
        Strip keys;
        reader.next(unit * uint32_t{kUnit} + own, stop, stage, keys);
        stage = (stage + 1) % KeyRing<kKeys>::kStages;
#pragma unroll
        for (int side = 0; side < kSides; ++side) {
          const uint32_t (&b)[2 * kSteps] = keys.b[side];
#pragma unroll
          for (int i = 0; i < kSteps / 2; ++i)
            s.keys[buffer][warp][side][i][lane] = {b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]};
          if (lane % 4 == 0) s.factor[buffer][own + 8 * side + lane / 4] = keys.factor[side];
        }
      }
      // Units alternate between two buffers, so one barrier is enough.
      __syncthreads();
#pragma unroll 1
      for (int strip = 0; strip < kWarps; ++strip) {
        const uint32_t first = unit * uint32_t{kUnit} + strip * kStrip;
        if (first >= longest) break;
        uint32_t b[kSides][2 * kSteps];
#pragma unroll
        for (int side = 0; side < kSides; ++side)
#pragma unroll
          for (int i = 0; i < kSteps / 2; ++i) {
            const uint4 four = s.keys[buffer][strip][side][i][lane];
            b[side][4 * i] = four.x, b[side][4 * i + 1] = four.y;
            b[side][4 * i + 2] = four.z, b[side][4 * i + 3] = four.w;
          }
        Products products;
        multiply<kRowTiles>(rows, b, products);
        Sums sums[kWarpTokens] = {};
#pragma unroll
        for (int i = 0; i < kWarpTokens; ++i) weigh(rows, products, i * kTokenTiles, sums[i]);
        const float sum = add_lanes<kWarpTokens>(sums);
        const float factor = s.factor[buffer][strip * kStrip + key_of_lane()];
        if (kWarpTokens == 1) {
          if (!(lane & 4)) store(first_token, length[0], first + key_of_lane(), sum, factor);
        } else {
          const bool second = lane & 4;
          store(first_token + second, second ? length[kWarpTokens - 1] : length[0], first + key_of_lane(), sum, factor);
        }
      }
    }
  }

  __device__ void run() {
    const Share share = find_share<kGroup>(p, s.share);
    int64_t left = share.cost, offset = share.offset;
#pragma unroll 1
    for (int64_t index = share.group; left > 0; ++index) {
      const Group<kGroup> group(p, index);
      const int64_t stop = min(offset + left, group.cost);  // of this group
      if (group.alike) {
        // another block rounds the same way
        const auto unit = [](int64_t cost) { return static_cast<int32_t>((cost + kGroup - 1) / kGroup); };
        if (unit(offset) < unit(stop)) score_group(group, unit(offset), unit(stop));
      } else {
        int64_t before = 0;
#pragma unroll 1
        for (int i = 0; i < kGroup && group.first + i < p.tokens; ++i) {
          const int32_t units = units_of(p.length_of(group.first + i));
          const int64_t begin = max(offset - before, int64_t{0}), end = min(stop - before, int64_t{units});
          if (begin < end) score_token(group.first + i, static_cast<int32_t>(begin), static_cast<int32_t>(end));
          before += units;
        }
      }
      left -= stop - offset;
      offset = 0;
    }
  }
};

template <KeyNumber kKeys, int kTokenTiles, int kPasses, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) scores_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) uint8_t memory[];
  Scorer<kKeys, kTokenTiles, kPasses, kAligned>{p, *reinterpret_cast<Shared<kKeys, kPasses>*>(memory)}.run();
}

}  // namespace mla::cuda::index
