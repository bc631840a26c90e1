// What an entry of the plan gives a CTA to do, token by token. The plan may be a caller's, and stale: nothing in it is
// trusted to be within the problem.
#pragma once

#include <cstdint>

#include "mla/problem.h"

namespace mla::cuda {

// A CTA's share of one token: tiles [tile_begin, tile_end) of its main list, then of its extra one.
struct TokenWork {
  int token;
  int main_length, extra_length;  // slots in each list
  int main_tiles;                 // in the main list
  int tiles;                      // in both
  int tile_begin;
  int tile_end;
  // By the plan alone: whatever the lengths are by now, a token's CTAs agree on whether it is split.
  enum Split { kWhole, kOpened, kContinued } split;  // by an earlier CTA, and perhaps by later ones too

  __device__ bool whole() const { return split == kWhole; }
};

// A split of a token.
struct TokenSplit {
  int64_t first_partial;  // the partial slot of the token's first split
  int64_t partial;        // of this split
  int splits;             // of the token
};

struct CtaWork {
  const AttentionProblem& p;
  PlanEntry entry;
  int index;
  int tile_slots;  // a power of two
  int tile_shift;  // its log2
  int token_begin, token_end;

  __device__ CtaWork(const AttentionProblem& problem, int index, int max_tile_slots)
      : CtaWork(problem, index, entry_of(problem, index), max_tile_slots) {}

  __device__ CtaWork(const AttentionProblem& problem, int index, const PlanEntry& entry, int max_tile_slots)
      : p(problem), entry(entry), index(index) {
    // so many at least, as in any plan: then the tiles of a token can be counted in 32 bits
    constexpr int kLeastTileSlots = 16;
    tile_shift = 31 - __clz(min(max(entry.tile_slots, kLeastTileSlots), max_tile_slots));
    tile_slots = 1 << tile_shift;
    token_begin = min(max(entry.token_begin, 0), p.tokens);
    token_end = max(min(entry.token_end, p.tokens), token_begin);  // their difference is no wild number either
  }

  // CTAs beyond the plan have no tokens; there are some where clusters fill the grid.
  static __device__ PlanEntry entry_of(const AttentionProblem& p, int index) {
    PlanEntry entry = p.plan[min(index, p.ctas - 1)];
    if (index >= p.ctas) entry.token_begin = entry.token_end = 0;
    return entry;
  }

  // Calls visit(tile, token, whether it is the token's first one) for all tiles. They are counted from 0.
  template <typename Visit>
  __device__ __forceinline__ void each_tile(Visit visit) const {
    int tile = 0;
    for (int token = token_begin; token < token_end; ++token) {
      const TokenWork own = work(token);
      const int begin = tile, end = tile + own.tile_end - own.tile_begin;
      for (; tile < end; ++tile) visit(tile, token, tile == begin);
    }
  }

  __device__ TokenWork work(int token) const {
    TokenWork w;
    w.token = token;
    w.main_length = clamp_length(p.lists[0].length, token, p.lists[0].topk);
    w.extra_length = p.list_count > 1 ? clamp_length(p.lists[1].length, token, p.lists[1].topk) : 0;
    w.main_tiles = tiles_of_slots(w.main_length);
    w.tiles = w.main_tiles + tiles_of_slots(w.extra_length);
    w.split = token == entry.token_begin && entry.tile_begin > 0 ? TokenWork::kContinued
              : token == entry.token_end - 1 && entry.splits > 1 ? TokenWork::kOpened
                                                                 : TokenWork::kWhole;
    w.tile_begin = token == entry.token_begin ? min(max(entry.tile_begin, 0), w.tiles) : 0;
    w.tile_end = token == entry.token_end - 1 ? max(min(entry.tile_end, w.tiles), w.tile_begin) : w.tiles;
    return w;
  }

  __device__ int tiles_of_slots(int slots) const {
    return static_cast<int>((static_cast<uint32_t>(slots) + tile_slots - 1) >> tile_shift);
  }

  // The first tile of a token that not all heads see to its end; none in a token whose heads see all.
  __device__ int first_hidden_tile(const TokenWork& w) const {
    const int most = p.most_unseen();
    return most == 0 ? INT32_MAX : max(w.main_length - most, 0) >> tile_shift;
  }
  // How many slots of a tile a head sees.
  __device__ int seen_of_tile(const TokenWork& w, int tile, int head) const {
    return w.main_length - p.unseen(head) - tile * tile_slots;
  }

  // Of all its tokens together; every lane of a warp calls this.
  __device__ int tiles(int lane) const {
    int sum = 0;
    for (int first = token_begin; first < token_end; first += 32) {
      int own = 0;
      if (first + lane < token_end) {
        const TokenWork w = work(first + lane);
        own = w.tile_end - w.tile_begin;
      }
      sum += __reduce_add_sync(~0u, own);
    }
    return sum;
  }

  // The partial slot of a token that is not whole.
  __device__ int64_t partial(const TokenWork& w) const {
    return w.split == TokenWork::kContinued ? entry.partial : begun_partial(entry);
  }

  // Which CTA's entry says how many splits the token has that it continues.
  __device__ int owner() const {
    return static_cast<int>(min(max(int64_t{index} - entry.split, int64_t{0}), int64_t{p.ctas} - 1));
  }
  // Which split it has of the token that it begins and leaves open, or of the one that it continues.
  __device__ TokenSplit opened_split() const { return {begun_partial(entry), begun_partial(entry), entry.splits}; }
  __device__ TokenSplit continued_split(int splits) const {
    return {int64_t{entry.partial} - entry.split, entry.partial, splits};
  }
};

// The slots of one tile: `count` of them from `begin` on in a token's list.
struct TileSlots {
  int list;
  int begin;
  int count;
};

__device__ __forceinline__ TileSlots slots_of(const TokenWork& w, int tile, int tile_slots) {
  const int list = tile >= w.main_tiles;
  const int begin = (list ? tile - w.main_tiles : tile) * tile_slots;
  return {list, begin, min(tile_slots, (list ? w.extra_length : w.main_length) - begin)};
}

}  // namespace mla::cuda
