#include "cpu/ops.h"

namespace mla::cpu {

void make_plan(const PlanShape& shape, PlanRow* rows, int workers) {
  int64_t units = 0;
  for (int32_t token = 0; token < shape.tokens; ++token) units += 1 + token_tiles(shape, token);

  const int64_t active = active_workers(shape, units, workers);

  int32_t token = 0;     // the token that `units_before` units precede
  int64_t units_before = 0;
  PlanBorder begin{0, 0};
  int32_t parts_so_far = 0;  // of the token that the worker before left open
  int32_t place = 0;
  for (int worker = 0; worker < workers; ++worker) {
    PlanBorder end{shape.tokens, 0};
    if (worker + 1 < active && shape.tokens > 0) {
      const int64_t cut = units * (worker + 1) / active;
      while (units_before + 1 + token_tiles(shape, token) <= cut) units_before += 1 + token_tiles(shape, token++);
      end = settle_border(shape, token, token_tiles(shape, token), cut - units_before);
    }

    PlanRow& row = rows[worker];
    row = row_between(shape, begin, end);
    row.place = place;
    if (begin.tile > 0) row.part = parts_so_far;
    const bool passes_on = begin.tile > 0 && end.tile > 0 && begin.token == end.token;
    if (end.tile > 0) parts_so_far = (passes_on ? row.part : 0) + 1;
    place += (begin.tile > 0) + (end.tile > 0) - passes_on;
    begin = end;
  }

  // How many parts each cut token has is known once its last part is.
  for (int worker = 0; worker < workers; ++worker) {
    if (rows[worker].tile_begin == 0 || rows[worker].token_begin == rows[worker].token_end) continue;
    rows[worker - rows[worker].part].parts = rows[worker].part + 1;
  }
}

}  // namespace mla::cpu
