// The plan says which worker attends to which part of which token's slot list. A worker is a turn of a thread of the
// CPU's pool, or a thread block of the GPU for each group of heads.
//
// Every token's list (its main list, then its extra one) is cut into tiles of `granule` slots; a list never
// shares a tile with the other. Lay the tiles of all tokens end to end, with a few more units in front of each
// token for its fixed cost, and cut that line into equal stretches: each worker gets one. So a worker has whole
// tokens in the middle and at most one unfinished token at either end, and partial results need two places a
// worker, however many tokens there are. On a GPU, equal tokens stay whole where that idles less than cuts cost.
#pragma once

#include <cstdint>

#include "mla/platform.h"

namespace mla {

// One row of the plan table, 8 int32.
struct PlanRow {
  int32_t token_begin;  // this worker computes tokens [token_begin, token_end)
  int32_t token_end;
  int32_t tile_begin;  // where it begins in its first token, in tiles
  int32_t tile_end;    // where it ends in its last token; the token's tile count unless a later worker goes on
  int32_t part;        // which part of its first token this is: 0 when it begins at tile 0
  int32_t parts;       // into how many parts its last token is cut, where that token begins here; else 1
  int32_t place;       // where its partial results go: this many come from the workers before it
  int32_t granule;     // slots a tile
};
static_assert(sizeof(PlanRow) == 32, "a plan row is 8 int32");

// A worker has up to two partial results: of the token it continues from an earlier worker, at `place`, and of
// the one it begins and leaves open, at the place after that (or at `place`, if it continued none). So the parts
// of one token lie at consecutive places, and 2 * workers places are enough.
MLA_HOST_DEVICE int64_t begun_place(const PlanRow& row) { return int64_t{row.place} + (row.tile_begin > 0); }

// How the lists of one problem are measured.
struct PlanShape {
  int32_t tokens;
  int32_t topk;
  int32_t extra_topk;
  int32_t granule;
  int32_t token_units;            // what a token costs besides its tiles, in tiles; see token_units()
  int32_t min_part;               // tiles that cuts are apart at least; no part has fewer than half as many
  int32_t good_part;              // tiles a worker should get before more workers than processors are put to work
  int32_t workers_per_processor;  // that share it in turn, so that a slow processor does fewer of them
  bool whole_tokens;              // never cut a token: its bits then don't depend on its neighbours
  const int32_t* length;          // [tokens] or null
  const int32_t* extra_length;    // [tokens] or null
};

MLA_HOST_DEVICE int32_t clamp_length(const int32_t* length, int32_t token, int32_t topk) {
  if (!length) return topk;
  const int32_t n = length[token];
  return n < 0 ? 0 : (n < topk ? n : topk);
}

MLA_HOST_DEVICE int32_t tiles_of(int32_t slots, int32_t granule) { return slots / granule + (slots % granule != 0); }

MLA_HOST_DEVICE int32_t token_tiles(const PlanShape& shape, int32_t token) {
  return tiles_of(clamp_length(shape.length, token, shape.topk), shape.granule) +
         tiles_of(clamp_length(shape.extra_length, token, shape.extra_topk), shape.granule);
}

// Where there are two workers for each token or more, most of them pay for one token's beginning and end, whatever
// their share.
MLA_HOST_DEVICE int32_t token_units(const PlanShape& shape, int64_t workers) {
  return 2 * int64_t{shape.tokens} > workers ? shape.token_units : 1;
}

// A border between two workers: everything before (token, tile) belongs to the left one.
struct PlanBorder {
  int32_t token;
  int32_t tile;
};

// Where a cut that falls `offset` units into a token of `tiles` tiles really goes: to the token's border if it would
// leave less than half a part on either side.
MLA_HOST_DEVICE PlanBorder settle_border(const PlanShape& shape, int32_t token, int32_t tiles, int64_t offset) {
  // the fixed cost is spread over the token, since both sides of a cut pay it
  const int64_t units = int64_t{tiles} + shape.token_units;
  const int32_t tile = static_cast<int32_t>((2 * offset * tiles + units) / (2 * units));
  const PlanBorder before{token, 0}, after{token + 1, 0};
  if (shape.whole_tokens) return 2 * tile < tiles ? before : after;
  if (2 * tile < shape.min_part) return before;
  if (2 * (tiles - tile) < shape.min_part) return after;
  return {token, tile};
}

// The row of a worker between two borders; which part of a token it holds, and where that goes, is told later.
MLA_HOST_DEVICE PlanRow row_between(const PlanShape& shape, PlanBorder begin, PlanBorder end) {
  PlanRow row{begin.token, end.token + (end.tile > 0), begin.tile, end.tile, 0, 1, 0, shape.granule};
  if (end.tile == 0 && end.token > begin.token) row.tile_end = token_tiles(shape, end.token - 1);
  return row;
}

// Where the cut in front of worker `index` of `active` falls, of so many units: to the nearest one, so that equal
// tokens are cut into equal parts where their tiles allow it.
MLA_HOST_DEVICE int64_t cut_before(int64_t index, int64_t active, int64_t units) {
  return units / active * index + (units % active * index + active / 2) / active;
}

// Of `workers` rows, how many get work. Stretches shorter than a part would only be moved to a border again, so short
// lists occupy fewer. A multiple of the tokens is preferred where that leaves few idle: if the tokens are equal then,
// none shares a worker with another, and fewer are cut or none.
MLA_HOST_DEVICE int64_t active_workers(const PlanShape& shape, int64_t units, int64_t workers) {
  if (shape.workers_per_processor == 1 && shape.tokens > 0) {
    const int64_t even = workers - workers % shape.tokens;
    if (16 * even >= 15 * workers) workers = even;
  }
  const int64_t least = workers / shape.workers_per_processor;
  const int64_t tiles = units - int64_t{shape.tokens} * shape.token_units;
  const int64_t good = units / shape.good_part, useful = (tiles > shape.tokens ? tiles : shape.tokens) / shape.min_part;
  const int64_t wanted = good < least ? least : (good < workers ? good : workers);
  return useful < 1 ? 1 : (wanted < useful ? wanted : useful);
}

// The tiles of a token whose lists are full, and the units of as many such tokens as there are.
MLA_HOST_DEVICE int64_t full_tiles(const PlanShape& shape) {
  return int64_t{tiles_of(shape.topk, shape.granule)} + tiles_of(shape.extra_topk, shape.granule);
}
MLA_HOST_DEVICE int64_t full_units(const PlanShape& shape) {
  return shape.tokens * (shape.token_units + full_tiles(shape));
}

// If all lists are full: how many workers get work where no token is cut, or 0 if cuts are worth what they cost. That
// is partial results, their merge, and the beginning and end of a token once more for almost every worker: about as
// much as kCutTiles for each. Whole tokens cost what workers idle in the last round of them. Tokens of several workers
// each are cut for clusters of blocks, which merge cheaply. No more workers than those rounds need are put to work:
// then none gets a token more. Nobody knows that of unequal tokens, nor on CPUs, where processors are seldom equally
// fast.
MLA_HOST_DEVICE int64_t whole_token_workers(const PlanShape& shape, int64_t workers) {
  constexpr int64_t kCutTiles = 8;
  const int64_t tokens = shape.tokens, tiles = full_tiles(shape);
  if (shape.workers_per_processor > 1 || tiles == 0 || 2 * tokens <= workers) return 0;
  const int64_t rounds = (tokens + workers - 1) / workers;
  if ((rounds * workers - tokens) * tiles > kCutTiles * workers) return 0;
  return (tokens + rounds - 1) / rounds;
}

}  // namespace mla
