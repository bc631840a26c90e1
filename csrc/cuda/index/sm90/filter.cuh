// Scores keys by wgmma, and keeps of each token those that may be among its best. In a CTA
//
//   a warpgroup multiplies tiles of 64 keys with the queries of a group of tokens: products[64 keys x heads of all
//     tokens] = keys[64 x 128] queries[128 x ...], e4m3. A row of the accumulator is a key: a lane sums up weight *
//     relu over its columns of each token, four lanes exchange, and the scores go to a ring in shared memory
//   four warps read them. Each has a token, or a stretch of a token's tiles if the group has fewer tokens than four.
//   What
//     may be among the best joins the warp's list, in global memory (that is, in L2), by rising position. Once there is
//     enough of it, a histogram of the token's candidates says which score topk of them are above: what is not above it
//     joins no more, and leaves the list when that is full
//   one more warp asks for keys
//
// Two CTAs share a processor: while one sums up, the other's products occupy the tensor cores.
//
// MXFP4 keys become e4m3 in the registers that they are multiplied from (mxfp4.cuh). Two warpgroups take turns at their
// tiles, as a tile's way from its load to its score is long.
//
// A score is one sequence of operations, whatever the number of tokens, the tile's place and the CTA.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>

#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/swizzle.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/index/sm90/list.cuh"
#include "cuda/index/sm90/mxfp4.cuh"
#include "cuda/index/sm90/share.cuh"

namespace mla::cuda::index::sm90 {

// Warpgroups that multiply, and what the kernel has in all: with two of them, whole warpgroups, as setmaxnreg wants.
template <int kTokens, bool kMx>
constexpr int kMathGroups = kMx ? 2 : 1;
template <int kTokens, bool kMx>
constexpr int kFilterThreads = kMathGroups<kTokens, kMx> == 1 ? 128 + 32 * kLists + 32 : 512;
// Of two warpgroups that multiply, of the lists, and of the copies: what 64 a thread at launch add up to.
constexpr int kMathRegisters = 80, kListRegisters = 48, kCopyRegisters = 48;
constexpr int kMathBarrier = 1, kListBarrier = 2;
constexpr int kRing = 16;  // tiles of scores, so that a warp may look at its list while the others go on
constexpr int kScoreStride = kTileKeys + 8;  // so that stores of four tokens use all banks

// 64 keys by so many columns.
template <int kColumns>
using KeysAtom =
    std::conditional_t<kColumns == 128, gmma::MMA_64x128x32_F32E4M3E4M3_SS_TN<>,
                       std::conditional_t<kColumns == 64, gmma::MMA_64x64x32_F32E4M3E4M3_SS_TN<>,
                                          std::conditional_t<kColumns == 32, gmma::MMA_64x32x32_F32E4M3E4M3_SS_TN<>,
                                                             gmma::MMA_64x16x32_F32E4M3E4M3_SS_TN<>>>>;
// The same, with keys in registers.
template <int kColumns>
using RegisterKeysAtom =
    std::conditional_t<kColumns == 128, gmma::MMA_64x128x32_F32E4M3E4M3_RS_TN<>,
                       std::conditional_t<kColumns == 64, gmma::MMA_64x64x32_F32E4M3E4M3_RS_TN<>,
                                          std::conditional_t<kColumns == 32, gmma::MMA_64x32x32_F32E4M3E4M3_RS_TN<>,
                                                             gmma::MMA_64x16x32_F32E4M3E4M3_RS_TN<>>>>;

// kHeads: of a token, some of them zeros. kMx: keys are MXFP4, else e4m3.
template <int kHeads, int kTokens, bool kMx>
struct FilterShared {
  static constexpr int kColumns = kHeads * kTokens;
  static constexpr int kStages = kMx ? (kColumns == 256 ? 12 : 16) : kColumns == 256 ? 6 : kTokens > 1 ? 8 : 10;
  static constexpr int kFlags = 32;  // at least kStages + kRing
  // Scores lie in the ring where keys do in theirs; who asks for keys waits for those scores.
  static constexpr bool kOneRing = kMx && kStages == kRing;
  std::conditional_t<kMx, MxTile, SwizzledRows<kTileKeys>> keys[kStages];
  SwizzledRows<kColumns> queries;
  alignas(16) float scale[kStages][kTileKeys];  // MXFP4: four bytes
  std::conditional_t<kMx, MxTables, int> tables;
  float4 weight[kColumns / 4];  // of a lane's four columns of 16: [token][16 columns][lane % 4]
  float scores[kRing][kTokens][kScoreStride];
  ListToken tokens[kTokens];
  uint2 valid[kFlags];  // of a tile: a bit for each key that there is
  SharedShare share;
  alignas(8) Barrier full[kStages], empty[kStages], scored[kRing], taken[kRing];

  __device__ Barrier& emptied(uint32_t stage) { return kOneRing ? scored[stage] : empty[stage]; }
};

template <int kHeads, int kTokens, bool kMx>
struct Filter {
  using Shared = FilterShared<kHeads, kTokens, kMx>;
  static constexpr int kKeyBytes = key_value_bytes(kMx ? KeyNumber::mxfp4 : KeyNumber::e4m3);
  static constexpr int kColumns = Shared::kColumns, kStages = Shared::kStages;
  static constexpr int kGroups = kMathGroups<kTokens, kMx>, kMathThreads = 128 * kGroups;
  // Of each token so many warps, and lists: they take the tiles in turn, each a stretch of neighbours.
  static constexpr int kStretches = kLists / kTokens;
  // Many columns come in parts, for which registers are enough.
  static constexpr int kParts = kMx && kColumns > 64 ? kColumns / 64 : kColumns == 256 ? 2 : 1;
  static constexpr int kPartColumns = kColumns / kParts;
  using Atom = std::conditional_t<kMx, RegisterKeysAtom<kPartColumns>, KeysAtom<kPartColumns>>;

  const Problem& p;
  Shared& s;

  __device__ void init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        s.full[i].init(p.whole_tiles ? 1 : 32 + 1);
        s.empty[i].init(4 * kWarpArrivals);
      }
      for (int i = 0; i < kRing; ++i) {
        s.scored[i].init(4 * kWarpArrivals);
        s.taken[i].init(kTokens * kWarpArrivals);
      }
      cutlass::arch::fence_barrier_init();
    }
    if constexpr (kMx) s.tables.init();
  }

  // ---- the warpgroups that multiply ----

  __device__ static void sync() { sync_named<kMathThreads>(kMathBarrier); }

  // The first of the warp's 16 rows of a tile.
  __device__ static int math_row(uint32_t thread) { return (kGroups == 1 ? thread : thread % 128) / 32 * 16; }
  // A lane's scores of a tile: of one token, and of so many keys, 8 apart.
  static constexpr int kLaneKeys = kTokens >= 4 ? 2 : 1;
  __device__ static int lane_token() {
    const int lane = threadIdx.x % 32, high = lane & 1, low = lane >> 1 & 1;
    return kTokens >= 4 ? 2 * high + low : kTokens == 2 ? high : 0;
  }
  __device__ static int lane_key() {
    const int lane = threadIdx.x % 32;
    return lane / 4 + 8 * (kTokens == 1 ? lane & 1 : kTokens == 2 ? lane >> 1 & 1 : 0);
  }
  __device__ static bool lane_has_key() { return kTokens > 1 || !(threadIdx.x & 2); }
  // Adds up what four lanes have of a key, each in the same order of the tree. Values are [token][half].
  template <int kCount>
  __device__ static void add_lanes(float (&values)[kCount], float (&own)[kLaneKeys]) {
    const bool high = threadIdx.x & 1, low = threadIdx.x & 2;
    constexpr int kHalf = kCount / 2;
    float kept[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float given = high ? values[i] : values[kHalf + i];
      kept[i] = (high ? values[kHalf + i] : values[i]) + __shfl_xor_sync(~0u, given, 1);
    }
    if constexpr (kHalf == 1) {
      own[0] = kept[0] + __shfl_xor_sync(~0u, kept[0], 2);
    } else {
#pragma unroll
      for (int i = 0; i < kHalf / 2; ++i) {
        const float given = low ? kept[i] : kept[kHalf / 2 + i];
        own[i] = (low ? kept[kHalf / 2 + i] : kept[i]) + __shfl_xor_sync(~0u, given, 2);
      }
    }
  }

  __device__ void stage_queries(int32_t group) const {
    const int thread = threadIdx.x;
#pragma unroll 1
    for (int i = thread; i < kColumns * 8; i += kMathThreads) {
      const int column = i / 8, piece = i % 8, head = column % kHeads;
      const int64_t token = int64_t{group} * kTokens + column / kHeads;
      uint4 values = {};
      if (head < p.heads && token < p.tokens) {
        const uint8_t* from =
            static_cast<const uint8_t*>(p.queries) + token * p.query_token + head * p.query_head + piece * kPieceBytes;
        if (p.queries_aligned)
          values = *reinterpret_cast<const uint4*>(from);
        else
          load_bytes<kPieceBytes, false>(from, &values);
      }
      const auto to = [&](int piece) {
        return reinterpret_cast<uint4*>(s.queries.bytes + (s.queries.address(column, piece) - s.queries.address()));
      };
      if constexpr (kMx) {
        const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          reinterpret_cast<uint32_t*>(to(mx_piece(4 * piece + j)))[mx_word(4 * piece + j)] = words[j];
      } else {
        *to(piece) = values;
      }
    }
#pragma unroll 1
    for (int i = thread; i < kColumns; i += kMathThreads) {
      const int64_t token = int64_t{group} * kTokens + i / kHeads;
      const int head = i % kHeads;
      const float weight = head < p.heads && token < p.tokens ? p.weights[token * p.weight_token + head] : 0.0f;
      reinterpret_cast<float*>(s.weight)[i / 16 * 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2] = weight;
    }
  }

  // A warp's 16 keys of a tile; those of e4m3 are multiplied where they lie.
  struct Keys {
    uint32_t a[kMx ? kIndexDim / 32 : 1][4];
    std::conditional_t<kMx, MxScales, float[2]> scales;
  };

  // Of these tiles, those that are the warpgroup's, from `step` on, which is its next one then.
  __device__ void score_tiles(uint32_t tiles, uint32_t& step) const {
    const int lane = threadIdx.x % 32, row = math_row(threadIdx.x) + lane / 4;
    [[maybe_unused]] uint32_t mx_group = hidden(row * kKeyGroups + lane % 4), half_signs;
    if constexpr (kMx) {
      mx_group = __shfl_sync(~0u, mx_group, lane);  // or it would be computed for each tile
      half_signs = s.tables.half_signs;
    }
    const float4* weights = s.weight + lane % 4;
    constexpr bool kKept = kColumns <= 64;  // weights, in registers
    float4 kept[kKept ? kColumns / 16 : 1];
    if constexpr (kKept)
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) kept[j] = weights[4 * j];
    const uint64_t queries = smem_descriptor_uniform(s.queries.address());
    [[maybe_unused]] const uint64_t keys = smem_descriptor_uniform(s.keys[0].address());
    uint32_t stage = step % kStages, parity = step / kStages & 1;
    const uint32_t end = step + tiles;
    float acc[kPartColumns / 2], linear[kTokens][2], absolute[kTokens][2];
    const auto multiply_part = [&](const Keys& now, int part) {
      fence_acc(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kIndexDim / 32; ++k) {
        const uint64_t b = queries + part * (kPartColumns * kRowBytes / 16) + 2 * k;
        if constexpr (kMx)
          wgmma<Atom>(acc, now.a[k], b, k > 0);
        else
          wgmma<Atom>(acc, keys + stage * (kTileKeys * kRowBytes / 16) + 2 * k, b, k > 0);
      }
      cute::warpgroup_commit_batch();
    };
    // What lies in a stage, as it is multiplied.
    const auto take = [&](uint32_t stage, uint32_t parity, Keys& keys) {
      wait(s.full[stage], parity);
      if constexpr (kMx) {
        keys.scales = MxScales(s.scale[stage], mx_group);
        mx_to_e4m3(s.keys[stage], s.tables, half_signs, mx_group, keys.scales, keys.a);
      } else {
        if (!p.whole_tiles) fence_async_shared();
        keys.scales[0] = s.scale[stage][row], keys.scales[1] = s.scale[stage][row + 8];
      }
    };
    // 2 relu(x) = x + |x|
    const auto sum_part = [&](int part) {
      constexpr int kSixteens = kHeads / 16;  // of a token
      constexpr int kOfPart = kPartColumns / 16, kStep = kOfPart > kSixteens ? kOfPart / kSixteens : 1;
#pragma unroll
      for (int j = 0; j < kOfPart / kStep; ++j) {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {  // tokens next to one another: their sums don't wait for each other
          const int own = i * kSixteens + j, sixteen = part * kOfPart + own, token = sixteen / kSixteens;
          const float4 weight = kKept ? kept[kKept ? sixteen : 0] : weights[4 * sixteen];
          const float four[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              const float x = acc[8 * own + 4 * (n / 2) + 2 * row + n % 2];
              linear[token][row] = fmaf(four[n], x, linear[token][row]);
              absolute[token][row] = fmaf(four[n], fabsf(x), absolute[token][row]);
            }
        }
      }
    };
#pragma unroll 1
    do {
      [[maybe_unused]] const uint32_t next_stage = stage + 1 == kStages ? 0 : stage + 1,
                                      next_parity = parity ^ (next_stage == 0);
      Keys now;
      take(stage, parity, now);
#pragma unroll
      for (int token = 0; token < kTokens; ++token)
#pragma unroll
        for (int i = 0; i < 2; ++i) linear[token][i] = absolute[token][i] = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        multiply_part(now, part);
        cute::warpgroup_wait<0>();
        fence_acc(acc);
        if (!kMx && part == kParts - 1) arrive_as_warp(s.empty[stage]);
        sum_part(part);
      }

      float values[2 * kTokens];
#pragma unroll
      for (int i = 0; i < 2 * kTokens; ++i) {
        const float sum = linear[i / 2][i % 2];
        if constexpr (kMx)
          values[i] = sum + absolute[i / 2][i % 2];
        else
          values[i] = fmaf(copysignf(1.0f, now.scales[i % 2]), sum, absolute[i / 2][i % 2]);
      }
      float scores[kLaneKeys];
      add_lanes(values, scores);
      const uint32_t ring = Shared::kOneRing ? stage : step % kRing;
      wait(s.taken[ring], (Shared::kOneRing ? parity : step / kRing & 1) ^ 1);
      const int half = kLaneKeys == 2 ? 0 : lane_key() / 8;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        float score;
        if constexpr (kMx)
          score = __fmul_rn((0.5f * kMxUnit) * scores[i], now.scales.factor(i + half));
        else
          score = __fmul_rn(0.5f * scores[i], fabsf(i + half ? now.scales[1] : now.scales[0]));
        if (lane_has_key()) s.scores[ring][lane_token()][row + 8 * (i + half)] = score;
      }
      if constexpr (kMx) {
        if (__any_sync(~0u, now.scales.far_apart())) score_keys_apart(stage, ring, now.scales);
        if constexpr (!Shared::kOneRing) arrive_as_warp(s.empty[stage]);
      }
      arrive_as_warp(s.scored[ring]);
      if constexpr (kGroups == 1) {
        stage = next_stage, parity = next_parity;
      } else {
        stage += kGroups;
        if (stage >= kStages) stage -= kStages, parity ^= 1;
      }
      step += kGroups;
    } while (kGroups == 1 ? step != end : static_cast<int32_t>(end - step) > 0);
  }

  // Scores again the warp's keys whose scales lie too far apart for one product, a head a lane at a time. Slow and
  // rare.
  __device__ void score_keys_apart(uint32_t stage, uint32_t ring, const MxScales& mx) const {
    const int thread = hidden(threadIdx.x), lane = thread % 32;
    const uint32_t apart = __ballot_sync(~0u, mx.far_apart(0)), apart_8_on = __ballot_sync(~0u, mx.far_apart(1));
    __syncwarp();  // this overwrites what lanes have stored
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      if (!((i < 8 ? apart : apart_8_on) >> i % 8 * 4 & 15)) continue;
      const int row = math_row(thread) + i;
#pragma unroll 1
      for (int token = 0; token < kTokens; ++token) {
        float sum = 0.0f;
#pragma unroll 1
        for (int head = lane; head < kHeads; head += 32) {
          const int column = token * kHeads + head;
          const float product = mx_product(s.keys[stage], float_bits(s.scale[stage][row]), row, s.queries, column);
          const float weight = reinterpret_cast<const float*>(
              s.weight)[column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2];
          sum = fmaf(weight, product < 0.0f ? 0.0f : product, sum);  // NaN stays
        }
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) s.scores[ring][token][row] = sum;
      }
    }
    __syncwarp();
  }

  __device__ void multiply(Share share, uint32_t warpgroup) const {
    uint32_t step = 0;
    walk<kTokens>(
        p, share,
        [&](int32_t group, const Group<kTokens>&) {
          sync();  // all are finished with the queries before
          stage_queries(group);
          fence_async_shared();
          sync();
        },
        [&](const Group<kTokens>&, int, int, uint32_t, uint32_t from, uint32_t to) {
          if constexpr (kGroups == 1) {
            score_tiles(to - from, step);
          } else {
            const uint32_t end = step + to - from;
            step += (warpgroup - step) % kGroups;
            if (static_cast<int32_t>(end - step) > 0) score_tiles(end - step, step);
            step = end;
          }
        },
        [](int32_t, bool, bool) {});
  }

  // Of a run's tiles, the one that comes at this turn: each stretch has one in each round.
  __device__ static uint32_t tile_at(uint32_t turn, uint32_t tiles) {
    const uint32_t each = tiles / kStretches, more = tiles % kStretches, stretch = turn % kStretches;
    return stretch * each + min(stretch, more) + turn / kStretches;
  }

  // ---- the warps that filter, and copy ----

  // Asks for the tiles of one run, one after the other.
  struct Copier {
    const Filter& f;
    const int32_t* table = nullptr;  // null if the request is none
    uint32_t longest = 0, from = 0, tiles = 0, turn = 0;
    uint32_t step = 0;  // of all runs
    // Blocks: of a lane's keys in the next tile. Of whole tiles: of one of 32 turns, and of one of the next 32.
    int32_t ahead[2];
    // Of units: where a lane's begin, now, 4 turns on and 8 turns on, in the tiles of 4 turns that `ahead` is of.
    int32_t unit[3];
    int64_t token = 0;
    // Of whole tiles of MXFP4 and one token: where that turn's keys lie, and how many keys further their scales.
    static constexpr bool kAddressAhead = kMx && kTokens == 1;
    const uint8_t* from_keys;
    uint32_t to_scales;

    __device__ bool has_candidates() const { return !kMx && kTokens == 1 && f.p.candidate_blocks.size > 0; }
    __device__ bool by_units() const { return has_candidates() && f.p.whole_tiles; }
    // The position of a key; -1 if there is none.
    __device__ int32_t position_of(uint32_t key) const {
      return key < longest ? f.p.position_at(token, static_cast<int32_t>(key)) : -1;
    }
    __device__ int32_t block_at(uint32_t position, bool there) const {
      const uint32_t entry = f.p.table_index(position);
      const int32_t block = table && there && entry < static_cast<uint32_t>(f.p.max_blocks) ? table[entry] : -1;
      return block < f.p.cache.blocks ? block : -1;
    }
    __device__ int32_t block_at(int32_t position) const {
      return block_at(static_cast<uint32_t>(position), position >= 0);
    }
    __device__ int32_t block_of(uint32_t key) const {
      return has_candidates() ? block_at(position_of(key)) : block_at(key, key < longest);
    }
    // The first key of a turn's tile; beyond the last turn that is beyond the last key.
    __device__ uint32_t key_at(uint32_t turn) const {
      return turn < tiles ? (from + tile_at(turn, tiles)) * kTileKeys : ~0u - kTileKeys;
    }

    __device__ void begin(int32_t request, uint32_t longest_of_run, uint32_t from_tile, uint32_t to_tile) {
      table = request >= 0 && request < f.p.requests ? f.p.block_table + int64_t{request} * f.p.table_stride : nullptr;
      longest = longest_of_run, from = from_tile, tiles = to_tile - from_tile, turn = 0;
      const uint32_t lane = threadIdx.x % 32;
      if (by_units()) {
#pragma unroll
        for (int i = 0; i < 3; ++i) unit[i] = unit_at(kUnitTurns * i);
        ahead[0] = block_at(unit[0]), ahead[1] = block_at(unit[1]);
      } else if (f.p.whole_tiles) {
        ahead[0] = block_of(key_at(lane)), ahead[1] = block_of(key_at(32 + lane));
      } else {
        ahead[0] = block_of(key_at(0) + lane), ahead[1] = block_of(key_at(0) + lane + 32);
      }
    }

    // Asks for all tiles, as soon as there is room for each.
    __device__ void ask() {
#pragma unroll 1
      for (; turn < tiles; ++turn, ++step)
        if (by_units())
          ask_units();
        else if (f.p.whole_tiles)
          ask_whole_tile();
        else
          ask_keys();
    }

    // A tile's units are 8 lanes', and a warp has those of 4 turns.
    static constexpr uint32_t kUnits = kTileKeys / kUnitKeys, kUnitTurns = 32 / kUnits;
    // The position of a lane's unit in the turns from this one on.
    __device__ int32_t unit_at(uint32_t turn) const {
      const uint32_t lane = threadIdx.x % 32;
      return position_of(key_at(turn + lane / kUnits) + lane % kUnits * kUnitKeys);
    }

    __device__ void ask_units() {
      const Problem& p = f.p;
      Shared& s = f.s;
      const uint32_t lane = threadIdx.x % 32, own = lane % kUnits, stage = step % kStages;
      if (turn % kUnitTurns == 0 && turn > 0) {
        unit[0] = unit[1], ahead[0] = ahead[1];
        unit[1] = unit[2], ahead[1] = block_at(unit[1]);
        unit[2] = unit_at(turn + 2 * kUnitTurns);
      }
      const bool there = lane / kUnits == turn % kUnitTurns && ahead[0] >= 0;
      // the keys that the token sees of its unit
      const uint32_t seen = there ? 0xffu >> (kUnitKeys - min(kUnitKeys, p.length[token] - unit[0])) : 0;
      const uint32_t low = __reduce_or_sync(~0u, own < kUnits / 2 ? seen << own * kUnitKeys : 0);
      const uint32_t high = __reduce_or_sync(~0u, own < kUnits / 2 ? 0 : seen << (own - kUnits / 2) * kUnitKeys);
      const uint32_t units = __popc(__ballot_sync(~0u, there));
      wait(s.emptied(stage), (step / kStages & 1) ^ 1);
      if (lane == 0) {
        s.valid[step % Shared::kFlags] = make_uint2(low, high);
        if (units > 0)
          arrive_and_expect(s.full[stage], units * kUnitKeys * (kKeyBytes + 4));
        else
          s.full[stage].arrive();
      }
      __syncwarp();
      if (there) {
        const auto position = static_cast<uint32_t>(unit[0]);
        const uint32_t within = position - p.table_index(position) * p.table_index.divisor;
        const uint8_t* data = p.cache.data + ahead[0] * p.cache.block_stride;
        const uint32_t to = s.keys[stage].address() + own * kUnitKeys * kKeyBytes;
        copy_keys(to, within, ahead[0], s.full[stage]);
        copy_bulk(cast_smem_ptr_to_uint(s.scale[stage] + own * kUnitKeys),
                  data + p.cache.block_size * kKeyBytes + int64_t{within} * 4, kUnitKeys * 4, s.full[stage]);
      }
      __syncwarp();
    }

    // e4m3 keys of a block, as many as p.keys says.
    __device__ void copy_keys(uint32_t to, uint32_t within, int32_t block, Barrier& full) const {
      asm volatile(
          "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
          "[%5];" ::"r"(to),
          "l"(&f.p.keys), "r"(0), "r"(within), "r"(block), "r"(cast_smem_ptr_to_uint(&full))
          : "memory");
    }

    // Lane by lane.
    __device__ void ask_whole_tile() {
      const Problem& p = f.p;
      Shared& s = f.s;
      const uint32_t lane = threadIdx.x % 32, stage = step % kStages, parity = (step / kStages & 1) ^ 1;
      if (turn % 32 == 0 && turn > 0) {
        ahead[0] = ahead[1];
        ahead[1] = block_of(key_at(turn + 32 + lane));
      }
      if (kAddressAhead && turn % 32 == 0) {
        const uint32_t key = key_at(turn + lane), within = key - p.table_index(key) * p.table_index.divisor;
        from_keys = p.cache.data + ahead[0] * p.cache.block_stride + int64_t{within} * kKeyBytes;
        to_scales = static_cast<uint32_t>(p.cache.block_size) - within + within / (kKeyBytes / 4);
      }
      if (lane == turn % 32) {
        const int32_t block = ahead[0];
        wait(s.emptied(stage), parity);
        const uint32_t all = block >= 0 ? ~0u : 0;
        s.valid[step % Shared::kFlags] = make_uint2(all, all);
        if (block >= 0) {
          const uint8_t *keys, *scales;
          [[maybe_unused]] uint32_t within;
          if constexpr (kAddressAhead) {
            keys = from_keys, scales = from_keys + int64_t{to_scales} * kKeyBytes;
          } else {
            const uint32_t key = key_at(turn);
            within = key - p.table_index(key) * p.table_index.divisor;
            const uint8_t* data = p.cache.data + block * p.cache.block_stride;
            keys = data + int64_t{within} * kKeyBytes;
            scales = data + p.cache.block_size * kKeyBytes + int64_t{within} * 4;
          }
          arrive_and_expect(s.full[stage], kTileKeys * (kKeyBytes + 4));
          if constexpr (kMx)
            copy_bulk(s.keys[stage].address(), keys, kTileKeys * kKeyBytes, s.full[stage]);
          else
            copy_keys(s.keys[stage].address(), within, block, s.full[stage]);
          copy_bulk(cast_smem_ptr_to_uint(s.scale[stage]), scales, kTileKeys * 4, s.full[stage]);
        } else {
          s.full[stage].arrive();
        }
      }
      __syncwarp();
    }

    __device__ void ask_keys() {
      const Problem& p = f.p;
      Shared& s = f.s;
      const int lane = threadIdx.x % 32, stage = step % kStages;
      const uint8_t *values[2], *scales[2];
      uint32_t valid[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t block = ahead[half];
        const bool there = block >= 0;
        const uint32_t place = key_at(turn) + lane + 32 * half,
                       key = has_candidates() && there ? position_of(place) : place;
        const uint32_t within = key - p.table_index(key) * p.table_index.divisor;
        const uint8_t* data = p.cache.data + (there ? block * p.cache.block_stride : 0);
        values[half] = data + (there ? int64_t{within} * kKeyBytes : 0);
        scales[half] = data + (there ? p.cache.block_size * kKeyBytes + int64_t{within} * 4 : 0);
        valid[half] = __ballot_sync(~0u, there);
        ahead[half] = block_of(key_at(turn + 1) + lane + 32 * half);
      }
      wait(s.emptied(stage), (step / kStages & 1) ^ 1);
      const uint32_t rows = s.keys[stage].address();
      constexpr int kPieces = kKeyBytes / kPieceBytes;
#pragma unroll
      for (int i = 0; i < kTileKeys * kPieces / 32; ++i) {
        const int row = 32 / kPieces * i + lane / kPieces, piece = lane % kPieces, half = i / kPieces;
        const auto own = reinterpret_cast<uint64_t>(values[half]);
        const auto* from_row = reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, own, row % 32));
        copy_16_or_zero(kMx ? rows + row * kKeyBytes + piece * kPieceBytes : swizzled(rows, row, piece),
                        from_row + piece * kPieceBytes, valid[half] >> row % 32 & 1);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        copy_4_or_zero(cast_smem_ptr_to_uint(&s.scale[stage][lane + 32 * half]), scales[half], valid[half] >> lane & 1);
      arrive_when_copied(s.full[stage]);
      if (lane == 0) {
        s.valid[step % Shared::kFlags] = make_uint2(valid[0], valid[1]);
        s.full[stage].arrive();
      }
      __syncwarp();
    }
  };

  using List = index::sm90::List<kStretches>;

  __device__ void filter(Share share) const {
    const int warp = warp_of_cta() - kMathThreads / 32, lane = threadIdx.x % 32;
    const int own = warp / kStretches, stretch = warp % kStretches;
    ListToken& token = s.tokens[own];
    uint32_t step = 0;
    int64_t list_index = 0;
    ListEnd end;
    walk<kTokens>(
        p, share,
        [&](int32_t group, const Group<kTokens>&) {
          list_index = (int64_t{group} + blockIdx.x) * kLists + warp;
          end = {0, ~0u, 0, kMinusInfinity};
          sync_lists();  // all are finished with the group before
          for (int i = lane; stretch == 0 && i < kListBins; i += 32) token.bins[i] = 0;
          if (lane == 0) token.bins_per_score = 0.0f, token.floor = -INFINITY, token.begun = 0;
          sync_lists();
        },
        [&](const Group<kTokens>& group, int first, int last, uint32_t, uint32_t from, uint32_t to) {
          uint32_t length = 0;
#pragma unroll
          for (int i = 0; i < kTokens; ++i)
            if (i == own && first <= i && i <= last) length = group.scored[i];
          List list{p.lists.candidates + list_index * p.lists.capacity, p.lists.capacity};
          const uint32_t tiles = to - from;
#pragma unroll 1
          for (uint32_t turn = stretch; turn < tiles; turn += kStretches) {
            const uint32_t at = step + turn, ring = at % kRing;
            wait(s.scored[ring], at / kRing & 1);
            const float score[2] = {s.scores[ring][own][lane], s.scores[ring][own][lane + 32]};
            const uint2 valid = s.valid[at % Shared::kFlags];
            const uint32_t first_key = (from + tile_at(turn, tiles)) * kTileKeys, key = first_key + lane;
            const bool there[2] = {((key < length) & (valid.x >> lane)) != 0,
                                   ((key + 32 < length) & (valid.y >> lane)) != 0};
            arrive_as_warp(s.taken[ring]);
            const float least = kStretches == 1 ? list.floor : fmaxf(list.floor, List::load(token.floor));
            if (list.join(score, there, least, first_key)) list.look(token, p.topk);
          }
          step += tiles;
          // Stretches alternate within a run, slots of the ring over all runs. After an odd run a warp would wait for
          // a slot whose last phase another warp has seen.
          if constexpr (kMx && kTokens == 2) sync_lists();
          if (length > 0) end = list.end(token, p.topk);
        },
        [&](int32_t group, bool has_first, bool has_last) {
          if (lane != 0) return;
          p.lists.ends[list_index] = end;
          if (warp == 0 && has_first) p.lists.first_cta[group] = blockIdx.x;
          if (warp == 0 && has_last) p.lists.last_cta[group] = blockIdx.x;
        });
  }

  __device__ void copy(Share share) const {
    Copier copier{*this};
    walk<kTokens>(
        p, share, [&](int32_t group, const Group<kTokens>&) { copier.token = group; },
        [&](const Group<kTokens>& group, int first, int, uint32_t longest, uint32_t from, uint32_t to) {
          int32_t request = group.request[0];
#pragma unroll
          for (int i = 1; i < kTokens; ++i)
            if (i == first) request = group.request[i];
          copier.begin(request, longest, from, to);
          copier.ask();
        },
        [](int32_t, bool, bool) {});
    wait_for_copies<0>();
  }

  __device__ static void sync_lists() { sync_named<32 * kLists>(kListBarrier); }

  __device__ void run() const {
    init();
    pdl_launch_dependents();
    pdl_wait();
    const Share share = find_share<kFilterThreads<kTokens, kMx>, kTokens>(p, s.share);  // has barriers
    const int warp = warp_of_cta();
    if (warp < kMathThreads / 32) {
      if constexpr (kGroups > 1) cutlass::arch::warpgroup_reg_alloc<kMathRegisters>();
      multiply(share, warp / 4);
    } else if (warp < kMathThreads / 32 + kLists) {
      if constexpr (kGroups > 1) cutlass::arch::warpgroup_reg_dealloc<kListRegisters>();
      filter(share);
    } else {
      if constexpr (kGroups > 1) {
        cutlass::arch::warpgroup_reg_dealloc<kCopyRegisters>();
        if (warp > kMathThreads / 32 + kLists) return;  // these complete the warpgroup
      }
      copy(share);
    }
  }
};

template <int kHeads, int kTokens, bool kMx>
__global__ void __launch_bounds__(kFilterThreads<kTokens, kMx>, kCtasPerProcessor)
    filter_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t filter_memory[];
  Filter<kHeads, kTokens, kMx>{p, *reinterpret_cast<FilterShared<kHeads, kTokens, kMx>*>(filter_memory)}.run();
#endif
}

}  // namespace mla::cuda::index::sm90
