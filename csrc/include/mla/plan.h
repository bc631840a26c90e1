// The plan says which CTA attends to which split of which token's indices. On a GPU there is such a CTA for each group
// of heads. On a CPU, "CTA" means an item of work for its threads.
//
// It splits all work evenly. A token's main list, then its extra one, is cut into tiles of `tile_slots` slots; the two
// lists never share a tile. The tiles of all tokens are concatenated, with a fixed cost in front of each token, and
// every CTA gets an equal, contiguous range. Work is counted in units: one for each tile, and the tokens' costs. A
// CTA therefore shares at most two tokens with others, its first and its last, and needs room for two partial
// results. On a GPU the launch may say that tokens stay whole, or get equal splits: see Launch.
#pragma once

#include <cstdint>

#include "mla/platform.h"
#include "mla/schedule/launch.h"

namespace mla {

// An entry of the plan: a row of its table, 8 int32.
struct PlanEntry {
  int32_t token_begin;  // this CTA computes tokens [token_begin, token_end)
  int32_t token_end;
  int32_t tile_begin;  // where it begins in its first token, in tiles
  int32_t tile_end;    // where it ends in its last token; the token's tile count unless a later CTA goes on
  int32_t split;       // which split of its first token this is: 0 when it begins at tile 0
  int32_t splits;      // of its last token, where that token begins here and is split; else 1
  int32_t partial;     // partial slot of its first partial result: the number of those of earlier CTAs
  int32_t tile_slots;  // slots of a tile
};
static_assert(sizeof(PlanEntry) == 32, "a plan entry is 8 int32");

// A CTA has up to two partial results: of the token that it continues from an earlier CTA, in partial slot
// `partial`, and of the one that it begins and leaves open, in the next one (or in `partial`, if it continues none). So
// the splits of a token have consecutive partial slots, and two per CTA are enough.
MLA_HOST_DEVICE int64_t begun_partial(const PlanEntry& entry) {
  return int64_t{entry.partial} + (entry.tile_begin > 0);
}

// What the op `plan` is given.
struct PlanProblem {
  int32_t tokens;
  int32_t topk;
  int32_t extra_topk;
  const int32_t* length;        // [tokens] or null
  const int32_t* extra_length;  // [tokens] or null
  bool whole_tokens;
  PlanEntry* entries;  // [launch.ctas]
  Launch launch;
};

// The same without the entries, and what tiles, tokens and splits cost on a device: see plan_shape().
struct PlanShape {
  int32_t tokens;
  int32_t topk;
  int32_t extra_topk;
  int32_t tile_slots;
  int32_t token_units;  // what a token costs besides its tiles, in tiles
  int32_t min_split;    // smallest distance of borders within a token, in tiles; no split has fewer than half of it
  int32_t good_split;   // tiles a CTA should get before there are more CTAs than processors
  int32_t ctas_per_processor;   // more than one, so that a slow processor can take fewer
  bool whole_tokens;            // never split a token: its bits then don't depend on its neighbours
  const int32_t* length;        // [tokens] or null
  const int32_t* extra_length;  // [tokens] or null
  int32_t splits;               // these two are the launch's
  int32_t cluster;
};

enum class PlanFor { cpu, gpu };

constexpr int kPlanCtasPerThread = 2;  // of a CPU, whose cores are seldom equally fast

inline PlanShape plan_shape(PlanFor device, const PlanProblem& p) {
  PlanShape shape{p.tokens, p.topk, p.extra_topk, 0, 0, 0, 0, 0, p.whole_tokens, p.length, p.extra_length, 0, 1};
  if (device == PlanFor::gpu) {
    shape.tile_slots = kGpuTileSlots;
    shape.token_units = token_units(p.tokens, p.launch.ctas);
    shape.min_split = 1;
    shape.good_split = 1;
    shape.ctas_per_processor = 1;
    shape.splits = p.launch.splits, shape.cluster = p.launch.cluster;
  } else {
    shape.tile_slots = 16;
    shape.token_units = 1;
    shape.min_split = 8;    // 128 slots take several times as long as waking a thread and combining
    shape.good_split = 32;  // with splits of 512 slots, more CTAs than threads pay off
    shape.ctas_per_processor = kPlanCtasPerThread;
  }
  return shape;
}

MLA_HOST_DEVICE int32_t clamp_length(const int32_t* length, int32_t token, int32_t topk) {
  if (!length) return topk;
  const int32_t n = length[token];
  return n < 0 ? 0 : (n < topk ? n : topk);
}

MLA_HOST_DEVICE int32_t tiles_of(int32_t slots, int32_t tile_slots) {
  return slots / tile_slots + (slots % tile_slots != 0);
}

MLA_HOST_DEVICE int32_t token_tiles(const PlanShape& shape, int32_t token) {
  return tiles_of(clamp_length(shape.length, token, shape.topk), shape.tile_slots) +
         tiles_of(clamp_length(shape.extra_length, token, shape.extra_topk), shape.tile_slots);
}

// A border between two CTAs: everything before (token, tile) belongs to the left one.
struct PlanBorder {
  int32_t token;
  int32_t tile;
};

// Moves a border that falls `offset` units into a token of `tiles` tiles to the token's border, if it would leave less
// than half of min_split on either side.
MLA_HOST_DEVICE PlanBorder settle_border(const PlanShape& shape, int32_t token, int32_t tiles, int64_t offset) {
  // the fixed cost is spread over the token, since both sides of a border pay it
  const int64_t units = int64_t{tiles} + shape.token_units;
  const int32_t tile = static_cast<int32_t>((2 * offset * tiles + units) / (2 * units));
  const PlanBorder before{token, 0}, after{token + 1, 0};
  if (shape.whole_tokens) return 2 * tile < tiles ? before : after;
  if (2 * tile < shape.min_split) return before;
  if (2 * (tiles - tile) < shape.min_split) return after;
  return {token, tile};
}

// The entry of a CTA between two borders; its split and its partial slot are filled in later.
MLA_HOST_DEVICE PlanEntry entry_between(const PlanShape& shape, PlanBorder begin, PlanBorder end) {
  PlanEntry entry{begin.token, end.token + (end.tile > 0), begin.tile, end.tile, 0, 1, 0, shape.tile_slots};
  if (end.tile == 0 && end.token > begin.token) entry.tile_end = token_tiles(shape, end.token - 1);
  return entry;
}

// Where CTA `index` of `active` begins, in units, rounded to the nearest: equal tokens get equal splits
// where their tiles allow it.
MLA_HOST_DEVICE int64_t start_of_cta(int64_t index, int64_t active, int64_t units) {
  return units / active * index + (units % active * index + active / 2) / active;
}

// How many of `ctas` entries get work. Ranges shorter than min_split would only be moved to a border again, so short
// lists occupy fewer CTAs.
MLA_HOST_DEVICE int64_t active_ctas(const PlanShape& shape, int64_t units, int64_t ctas) {
  if (shape.ctas_per_processor == 1 && shape.tokens > 0) ctas = ctas_of_load(shape.tokens, ctas);
  const int64_t least = ctas / shape.ctas_per_processor;
  const int64_t tiles = units - int64_t{shape.tokens} * shape.token_units;
  const int64_t good = units / shape.good_split,
                useful = (tiles > shape.tokens ? tiles : shape.tokens) / shape.min_split;
  const int64_t wanted = good < least ? least : (good < ctas ? good : ctas);
  return useful < 1 ? 1 : (wanted < useful ? wanted : useful);
}

// The tiles of a token whose lists are full, and the units of all tokens if all lists are full.
MLA_HOST_DEVICE int64_t full_tiles(const PlanShape& shape) {
  return int64_t{tiles_of(shape.topk, shape.tile_slots)} + tiles_of(shape.extra_topk, shape.tile_slots);
}
MLA_HOST_DEVICE int64_t full_units(const PlanShape& shape) {
  return shape.tokens * (shape.token_units + full_tiles(shape));
}

// How many CTAs get work where no token is split: 0 unless the launch is for whole tokens. It counts if all lists are
// full. Only as many get work as the rounds need, so that none has more tokens than there are rounds.
MLA_HOST_DEVICE int64_t whole_token_ctas(const PlanShape& shape, int64_t ctas) {
  if (shape.splits != 1 || shape.tokens == 0) return 0;
  return ceil_div(shape.tokens, ceil_div(shape.tokens, ctas));
}

// CTAs of a cluster combine the splits of one token in shared memory, but only if no CTA shares two tokens. That is
// worth kClusterTiles more tiles for the CTA that has most.
constexpr int32_t kMostEvenTokens = 1024;  // more than any GPU runs clusters at once
constexpr int64_t kClusterTiles = 4;
MLA_HOST_DEVICE bool even_splits_pay(int64_t longest, int64_t splits, int64_t units, int64_t ctas) {
  return longest <= splits * (kClusterTiles + units / ctas);
}

MLA_HOST_DEVICE bool may_fit_clusters(const PlanShape& shape, int64_t ctas) {
  return shape.splits == 0 && shape.cluster > 1 && !shape.whole_tokens && shape.tokens > 0 &&
         shape.tokens <= kMostEvenTokens && int64_t{shape.tokens} * shape.cluster <= ctas;
}

// How many splits every token gets, whatever its length; 0 where load alone says so.
MLA_HOST_DEVICE int64_t fixed_splits(const PlanShape& shape, int64_t units, int64_t ctas) {
  if (shape.whole_tokens || shape.splits < 2 || shape.tokens > kMostEvenTokens) return 0;
  if (int64_t{shape.tokens} * shape.splits != ctas) return 0;
  return even_splits_pay(full_tiles(shape), shape.splits, units, ctas) ? shape.splits : 0;
}

// The same in a plan by load for long lists, because a page table is wide, where the longest list is short after all:
// as many splits as a cluster has CTAs.
MLA_HOST_DEVICE int64_t cluster_splits(const PlanShape& shape, int64_t longest, int64_t units, int64_t ctas) {
  if (!may_fit_clusters(shape, ctas) || units == full_units(shape)) return 0;
  return even_splits_pay(longest, shape.cluster, units, ctas) ? shape.cluster : 0;
}

// Where a token's split begins, counted from the token's beginning; within the token.
MLA_HOST_DEVICE int64_t start_of_split(int64_t split, int64_t splits, int64_t token_units) {
  const int64_t start = (token_units * split + splits / 2) / splits;
  return start < token_units ? start : token_units - 1;
}

}  // namespace mla
