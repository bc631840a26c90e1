#include "cpu/plan/plan.h"

#include <algorithm>

#include "mla/ops.h"

namespace mla::cpu {

void make_plan(const PlanProblem& p) { fill_plan(plan_shape(PlanFor::cpu, p), p.entries, p.launch.ctas); }

void fill_plan(const PlanShape& given, PlanEntry* entries, int ctas) {
  PlanShape shape = given;
  int64_t units = 0, longest = 0;
  const auto units_of = [&](int32_t token) { return int64_t{shape.token_units} + token_tiles(shape, token); };
  for (int32_t token = 0; token < shape.tokens; ++token) {
    units += units_of(token);
    longest = std::max(longest, int64_t{token_tiles(shape, token)});
  }

  const int64_t whole = units == full_units(shape) ? whole_token_ctas(shape, ctas) : 0;
  int64_t splits = whole > 0 ? 0 : fixed_splits(shape, units, ctas);
  if (whole == 0 && splits == 0) splits = cluster_splits(shape, longest, units, ctas);
  const int64_t active = whole > 0 ? whole : splits > 0 ? splits * shape.tokens : active_ctas(shape, units, ctas);
  shape.whole_tokens |= whole > 0;

  int32_t token = 0;  // the token that `units_before` units precede
  int64_t units_before = 0;
  PlanBorder begin{0, 0};
  int32_t splits_so_far = 0;  // of the token that the CTA before left open
  int32_t partial = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    PlanBorder end{shape.tokens, 0};
    if (cta + 1 < active && shape.tokens > 0) {
      int64_t start = splits > 0 ? units_before : start_of_cta(cta + 1, active, units);
      if (splits > 0) {
        for (int64_t t = token; t < (cta + 1) / splits; ++t) start += units_of(static_cast<int32_t>(t));
        start += start_of_split((cta + 1) % splits, splits, units_of(static_cast<int32_t>((cta + 1) / splits)));
      }
      while (units_before + units_of(token) <= start) units_before += units_of(token++);
      end = settle_border(shape, token, token_tiles(shape, token), start - units_before);
    }

    PlanEntry& entry = entries[cta];
    entry = entry_between(shape, begin, end);
    entry.partial = partial;
    if (begin.tile > 0) entry.split = splits_so_far;
    const bool passes_on = begin.tile > 0 && end.tile > 0 && begin.token == end.token;
    if (end.tile > 0) splits_so_far = (passes_on ? entry.split : 0) + 1;
    partial += (begin.tile > 0) + (end.tile > 0) - passes_on;
    begin = end;
  }

  // How many splits a token has is known once its last one is.
  for (int cta = 0; cta < ctas; ++cta) {
    if (entries[cta].tile_begin == 0 || entries[cta].token_begin == entries[cta].token_end) continue;
    entries[cta - entries[cta].split].splits = entries[cta].split + 1;
  }
}

bool plan_fits(const PlanShape& shape, const PlanEntry* entries, int ctas) {
  PlanBorder at{0, 0};  // where the entries so far have come
  int32_t split = 0;    // splits so far of the token that is open there
  int owner = 0;        // the CTA that began it
  int32_t partial = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    const PlanEntry& entry = entries[cta];
    if (entry.tile_slots != shape.tile_slots) return false;
    if (at.tile == 0 && entry.token_begin == at.token && entry.token_end == at.token) {  // nothing to do
      if (entry.splits != 1) return false;                                               // or they would be combined
      continue;
    }
    if (entry.token_begin != at.token || entry.tile_begin != at.tile) return false;
    if (entry.token_end <= entry.token_begin || entry.token_end > shape.tokens) return false;
    const int32_t last = entry.token_end - 1;
    const bool one_token = last == entry.token_begin, continues = at.tile > 0;
    const int32_t tiles = token_tiles(shape, last);
    if (entry.tile_end > tiles || entry.tile_end < (one_token ? entry.tile_begin : 0)) return false;
    const bool leaves_open = entry.tile_end < tiles;
    if (leaves_open && entry.tile_end == 0) return false;  // a token is begun with a tile, or not at all
    const bool begins_open = leaves_open && !(one_token && continues);

    if (entry.partial != partial || (continues && entry.split != split)) return false;
    if (continues) ++split;
    const bool closes = continues && !(one_token && leaves_open);
    if (closes && entries[owner].splits != split) return false;
    if (begins_open) owner = cta, split = 1;
    if (!begins_open && entry.splits != 1)
      return false;  // if it begins an open token, its splits are checked above, when that token closes
    partial += continues + begins_open;
    at = leaves_open ? PlanBorder{last, entry.tile_end} : PlanBorder{entry.token_end, 0};
  }
  return at.token == shape.tokens && at.tile == 0;
}

}  // namespace mla::cpu
