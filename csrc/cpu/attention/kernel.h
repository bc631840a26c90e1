// Attention for one instruction set. Each isa_*.cpp includes this inside its anonymous namespace, after
// simd.h and a struct `Isa` with:
//
//   kPack                  numbers in a word (4 bytes): 2 bf16, or 1 fp32. Every matrix operand is made of words
//                          whose numbers are neighbours along the sum, so one loop serves both.
//   Session                lives as long as a call; its Memory is part of the workspace
//   kTiles                 whether it has a matrix unit with tiles, and functions of its own for that
//   kScoreAccumulators     accumulator registers of the score loop: (vectors of heads) x (tokens)
//   kValueHeads, kValueVectors   the same for the value loop: (heads) x (vectors of output dims)
//   kValueRows             rows that the value loop takes at once
//   load_words, store_words, broadcast_word, dot
//   pack(first, second)    P of two neighbouring tokens as words (the second only where kPack is 2)
//   widen_row<format>      a cached row as words; without scales, or (ue8m0) multiplied with them
//   load_values            the words of a step of the value loop: of a row, or (where kPack is 2) of two at once
//
// A CTA takes one token after the other. A token's valid rows are gathered into tiles of kTile; a tile is
// converted once for all heads and then, for a block of heads at a time:
//
//   scores   lanes are heads. Q was laid out once as [word of the head dim][head], and each word of a cached
//            row is broadcast against it: nothing is transposed.
//            In dense attention the heads of all queries are heads; a row that a query does not see scores -inf.
//   softmax  lanes are heads still, so the maximum and the sum over tokens need no shuffles.
//   values   lanes are output dims, P of (head, token pair) is broadcast.
//
// An fp32 scale of a quantised group never touches the cached values: e4m3 is exact in bf16, so the kernel
// multiplies the group's partial scores, and then P, with it. A scale that is a power of two does: the
// products are as exact in bf16.

constexpr int kTile = 128;  // rows converted together; 128 bf16 rows are 144 KB of L2
constexpr int kRowWords = kHeadDim / Isa::kPack;
constexpr int kRowStride = kRowWords + 16;  // an odd number of cache lines: one panel of all rows fits the L1 cache
constexpr int kTileRoom = kTile + Isa::kScoreAccumulators;  // the last block of scores may go beyond the tile
constexpr int kScoreVectors = 2;
constexpr int kScoreHeads = kScoreVectors * kLanes;  // heads a block
constexpr int kHeadSlots = (kMaxWorkHeads + kScoreHeads - 1) / kScoreHeads * kScoreHeads;
constexpr int kPanel = Isa::kValueVectors * kLanes;  // output dims that a pass over the tile's values covers
constexpr int kPanels = kValueDim / kPanel;
constexpr int kTileSteps = kTile / Isa::kPack;
constexpr int kGroups = 4;  // groups with an fp32 scale
static_assert(kValueDim % kPanel == 0 && (kValueDim / kGroups) % kPanel == 0, "a panel lies within one scale group");
static_assert(kRowStride * 4 / 64 % 2 == 1 && kFp8DsMla.scales() == kGroups);

// The rows of a tile, in the cache; all of one format.
struct TileRows {
  int count;
  const CacheFormat* format;
  const uint8_t* rows[kTile];
  const uint8_t* scales[kTile];  // where they lie at the page's end
  int32_t behind[kTile];         // slots of the token behind it, where not every query sees all of them
};

// A thread's working memory, which it keeps between calls.
struct Workspace {
  alignas(64) uint32_t q[kHeadSlots / kLanes][kRowWords][kLanes];
  alignas(64) uint32_t rows_as_words[kTileRoom][kRowStride];
  alignas(64) float scores[kTileRoom][kScoreHeads];
  alignas(64) uint32_t probs[kGroups][kTileSteps][kScoreHeads];
  alignas(64) float rescale[kScoreHeads];
  alignas(64) float out[kHeadSlots][kValueDim];
  alignas(64) float row_max[kHeadSlots];  // of the scaled scores, in units of log2(e)
  alignas(64) float total[kHeadSlots];
  TileRows tiles[2];  // this one and the next one
  float group_scale[kGroups][kTileRoom];
  Isa::Session::Memory unit;
};

// ---- Loading ---------------------------------------------------------------------------------------------

inline void load_q(const AttentionProblem& p, int token, int head_begin, int heads, Workspace& w) {
  const int vectors = (heads + kLanes - 1) / kLanes, words = p.head_dim() / Isa::kPack;
  const bool f16 = p.tile == TileType::f16_576;
  for (int v = 0; v < vectors; ++v) {
    const uint16_t* nope[kLanes];
    const uint16_t* rope[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      // the last head again where there are no more: its results are never looked at
      const int head = head_begin + (v * kLanes + lane < heads ? v * kLanes + lane : heads - 1);
      nope[lane] = p.q_nope + p.offset(p.q_nope_strides, token, head);
      rope[lane] = p.q_rope ? p.q_rope + p.offset(p.q_rope_strides, token, head) : nullptr;
    }
    for (int word = 0; word < words; ++word) {
      const int dim = word * Isa::kPack;
      const uint16_t* const* from = dim < kLatent ? nope : rope;
      const int at = dim < kLatent ? dim : dim - kLatent;
      for (int lane = 0; lane < kLanes; ++lane) {
        // two bf16 numbers are a word as they lie there; one is the upper half of an fp32 number
        if constexpr (Isa::kPack == 2)
          __builtin_memcpy(&w.q[v][word][lane], from[lane] + at, 4);
        else if (f16)
          w.q[v][word][lane] = float_bits(f16_to_float(from[lane][at]));
        else
          w.q[v][word][lane] = static_cast<uint32_t>(from[lane][at]) << 16;
      }
    }
  }
}

// Prefetches a tile's rows to L2, a few lines at a time: a core has room for about two dozen in flight, and drops more
// or stalls.
struct Prefetch {
  const TileRows& tile;
  int row_bytes = 0, lines = 0;  // lines of a call
  int row = 0, at = 0;

  Prefetch(const TileRows& tile, int calls) : tile(tile) {
    if (tile.count == 0) return;
    row_bytes = tile.format->row_bytes();
    lines = (tile.count * ((row_bytes + kLine - 1) / kLine) + calls - 1) / calls;
  }
  void some() {
    for (int i = 0; i < lines && row < tile.count; ++i) {
      __builtin_prefetch(tile.rows[row] + at, 0, 2);
      at += kLine;
      if (at < row_bytes) continue;
      if (tile.format->scales_at == ScalesAt::end_of_page) __builtin_prefetch(tile.scales[row], 0, 2);
      at = 0, ++row;
    }
  }

 private:
  static constexpr int kLine = 64;
};

// Walks the valid slots of a split of a token's lists, a tile at a time.
struct SlotWalk {
  const AttentionProblem& p;
  int token;
  int64_t at, end, length;  // in the current list
  int list = 0;
  int tile_begin, tile_end, tile_slots;  // what is left of the split, counted from the current list's first tile

  SlotWalk(const AttentionProblem& problem, int token, int tile_begin, int tile_end, int tile_slots)
      : p(problem), token(token), tile_begin(tile_begin), tile_end(tile_end), tile_slots(tile_slots) {
    enter();
  }

  void enter() {
    const int slots = clamp_length(p.lists[list].length, token, p.lists[list].topk);
    const int64_t begin = static_cast<int64_t>(tile_begin) * tile_slots,
                  stop = static_cast<int64_t>(tile_end) * tile_slots;
    length = slots;
    end = stop < length ? stop : length;
    at = begin < end ? begin : end;
    const int tiles = tiles_of(slots, tile_slots);
    tile_begin = tile_begin > tiles ? tile_begin - tiles : 0;
    tile_end = tile_end > tiles ? tile_end - tiles : 0;
  }

  // Up to kTile rows of one cache; none when the split is finished.
  void next(TileRows& tile) {
    tile.count = 0;
    for (;;) {
      const SlotList& from = p.lists[list];
      while (at < end && tile.count < kTile) from.paged ? add_page(from, tile) : add_slot(from, tile);
      tile.format = &from.cache.format;
      if (tile.count > 0 || list + 1 >= p.list_count) return;
      ++list;
      enter();
    }
  }

  void add_slot(const SlotList& from, TileRows& tile) {
    const int64_t slot = from.entries[token * from.stride + at++];
    if (!from.cache.holds(slot)) return;
    if (from.cache.format.scales_at == ScalesAt::end_of_page) tile.scales[tile.count] = from.cache.scales(slot);
    tile.rows[tile.count++] = from.cache.row(slot);
  }

  // Adds what is left of the page and fits into the tile.
  void add_page(const SlotList& from, TileRows& tile) {
    const int64_t slot = from.slot(token, static_cast<int32_t>(at)), room = kTile - tile.count;
    const int64_t to_page_end = from.cache.block_size - at % from.cache.block_size;
    const int64_t left = end - at < room ? end - at : room, rows = left < to_page_end ? left : to_page_end;
    if (from.cache.holds(slot)) {
      const uint8_t *row = from.cache.row(slot), *scales = from.cache.scales(slot);
      for (int64_t i = 0; i < rows; ++i, ++tile.count) {
        tile.rows[tile.count] = row + i * from.cache.row_stride;
        tile.scales[tile.count] = scales + i * from.cache.format.scale_bytes();
        tile.behind[tile.count] = static_cast<int32_t>(length - 1 - at - i);
      }
    }
    at += rows;
  }
};

// Converts rows [begin, end) of the tile to words. bf16 rows, which are words already, are copied, too: at a constant
// stride the loops need one pointer for all rows.
template <const CacheFormat& kFormat>
inline void convert_rows(const TileRows& tile, int begin, int end, Workspace& w) {
  for (int t = begin; t < end; ++t) {
    const uint8_t* const row = tile.rows[t];
    const uint8_t* const scales =
        kFormat.scales_at == ScalesAt::end_of_page ? tile.scales[t] : row + kFormat.scale_offset();
    Isa::template widen_row<kFormat>(row, scales, w.rows_as_words[t]);
    if constexpr (kFormat.scale == Scale::fp32)
      for (int g = 0; g < kGroups; ++g) __builtin_memcpy(&w.group_scale[g][t], scales + 4 * g, 4);
  }
}

using ConvertRows = void (*)(const TileRows& tile, int begin, int end, Workspace& w);

template <typename Unit = Isa>
inline ConvertRows converter(const CacheFormat& format) {
  switch (format.scale) {
    case Scale::fp32:
      return convert_rows<kFp8DsMla>;
    case Scale::ue8m0:
      return format.scales_at == ScalesAt::in_row ? convert_rows<kFp8_528> : convert_rows<kFp8Model1>;
    case Scale::tensor:
      return format.rope > 0 ? convert_rows<kFp8Tensor576> : convert_rows<kFp8Tensor512>;
    case Scale::e4m3:
      return convert_rows<kNvfp4>;
    case Scale::power:
    case Scale::none:
      break;
  }
  if constexpr (Unit::kPack == 1)
    if (format.code == Code::f16) return format.scale == Scale::power ? convert_rows<kStaged> : convert_rows<kFp16>;
  return format.rope > 0 ? convert_rows<kBf16> : convert_rows<kBf16_512>;
}

// ---- Scores ----------------------------------------------------------------------------------------------

template <int kVectors>
using ScoreAcc = Floats[Isa::kScoreAccumulators / kVectors][kVectors];

// Adds the products of some rows with kVectors vectors of heads, over the first `words` words from the pointers on. A
// function of its own, so that the compiler has all registers for it.
template <int kVectors, typename Unit = Isa>
__attribute__((noinline)) void multiply_rows(const uint32_t (*q)[kLanes], const uint32_t* rows, int words,
                                             ScoreAcc<kVectors>& result) {
  if constexpr (Unit::kTiles)
    return Unit::template multiply_rows<kVectors>(q, kRowWords, rows, kRowStride, words, result);
  constexpr int kTokens = Isa::kScoreAccumulators / kVectors;
  Floats acc[kTokens][kVectors];
#pragma GCC unroll 32
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[t][v] = result[t][v];
  for (int word = 0; word < words; ++word) {
    typename Isa::Words head[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) head[v] = Isa::load_words(q[v * kRowWords + word]);
#pragma GCC unroll 32
    for (int t = 0; t < kTokens; ++t) {
      const typename Isa::Words row = Isa::broadcast_word(rows + t * kRowStride + word);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[t][v] = Isa::dot(acc[t][v], head[v], row);
    }
  }
#pragma GCC unroll 32
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) result[t][v] = acc[t][v];
}

// What a pass over the tile's scores takes of all rows, as few words that those of Q stay in the L1 cache: a group with
// its scale, a part of the sum, or, of one vector of heads, everything.
template <bool kScaled, int kVectors>
constexpr int kPassWords = kScaled                        ? kLatent / kGroups / Isa::kPack
                           : Isa::kTiles || kVectors == 1 ? kRowWords
                                                          : kRowWords / 3;

// A pass over some rows: scores[token][head] becomes the score, times `scale`, with the last of `words` words.
template <bool kScaled, int kVectors>
inline void score_block(const uint32_t (*q)[kRowWords][kLanes], int first, int pass, int words, float scale,
                        Workspace& w) {
  const int begin = pass * kPassWords<kScaled, kVectors>;
  const bool has_scale = kScaled && pass < kGroups, last = has_scale || begin + kPassWords<kScaled, kVectors> >= words;
  const int end = begin + kPassWords<kScaled, kVectors> < words ? begin + kPassWords<kScaled, kVectors> : words;
  constexpr int kTokens = Isa::kScoreAccumulators / kVectors;
  ScoreAcc<kVectors> acc;
  for (int t = 0; t < kTokens; ++t)
    for (int v = 0; v < kVectors; ++v)
      acc[t][v] = kScaled || pass == 0 ? Floats{} : load(&w.scores[first + t][v * kLanes]);
  multiply_rows<kVectors>(q[0] + begin, w.rows_as_words[first] + begin, end - begin, acc);
  for (int t = 0; t < kTokens; ++t) {
    const float factor = !last ? 1.0f : scale * (has_scale ? w.group_scale[kScaled ? pass : 0][first + t] : 1.0f);
    for (int v = 0; v < kVectors; ++v) {
      float* to = &w.scores[first + t][v * kLanes];
      store(kScaled && pass > 0 ? load(to) + acc[t][v] * factor : acc[t][v] * factor, to);
    }
  }
}

// All scores of the tile for a block of heads. The first block's first pass converts the rows, and uses them while they
// are in the L1 cache.
template <bool kScaled, int kVectors>
inline void score_tile(const uint32_t (*q)[kRowWords][kLanes], int words, float scale, const TileRows& tile,
                       bool first_heads, Workspace& w) {
  constexpr int kTokens = Isa::kScoreAccumulators / kVectors;
  const ConvertRows convert = converter(*tile.format);
  for (int pass = 0; pass * kPassWords<kScaled, kVectors> < words; ++pass)
    for (int t = 0; t < tile.count; t += kTokens) {
      if (first_heads && pass == 0) convert(tile, t, t + kTokens < tile.count ? t + kTokens : tile.count, w);
      score_block<kScaled, kVectors>(q, t, pass, words, scale, w);
    }
}

// Hides the tile's rows from the heads of queries that come before them. `head` is the block's first head, of all.
inline void mask_block(const AttentionProblem& p, int head, int heads, const TileRows& tile, Workspace& w) {
  for (int t = 0; t < tile.count; ++t) {
    // that many queries are followed by all these slots, and more: the first ones
    const int queries = p.unseen(0) - tile.behind[t];
    const int hidden = queries <= 0 ? 0 : queries * p.query_heads - head;
    for (int lane = 0; lane < hidden && lane < heads; ++lane) w.scores[t][lane] = -__builtin_inff();
  }
}

// ---- Softmax ---------------------------------------------------------------------------------------------

// Turns the block's scores into P, packed for the value loop, and moves row max and total on.
template <bool kScaled>
inline void softmax_block(int head, int vectors, int count, bool first_tile, Workspace& w) {
  for (int v = 0; v < vectors; ++v) {
    const int lane = v * kLanes;
    const Floats before = first_tile ? broadcast(-__builtin_inff()) : load(&w.row_max[head + lane]);
    Floats row_max = before;
    for (int t = 0; t < count; ++t) row_max = larger(load(&w.scores[t][lane]), row_max);
    // A head all of whose scores are -inf has nothing to attend to yet; -inf minus -inf would be NaN.
    const Floats finite_max = row_max == -__builtin_inff() ? Floats{} : row_max;
    const Floats rescale = exp2_of(before - finite_max);
    Floats total = first_tile ? Floats{} : load(&w.total[head + lane]) * rescale;

    for (int step = 0; step * Isa::kPack < count; ++step) {
      const int t = step * Isa::kPack;
      const bool pair = Isa::kPack == 2 && t + 1 < count;
      const Floats prob = exp2_of(load(&w.scores[t][lane]) - finite_max);
      const Floats second = pair ? exp2_of(load(&w.scores[t + 1][lane]) - finite_max) : Floats{};
      total += prob + second;
      if (!kScaled) {
        Isa::store_words(Isa::pack(prob, second), &w.probs[0][step][lane]);
      } else {
        for (int g = 0; g < kGroups; ++g) {
          const float scale = w.group_scale[g][t], second_scale = pair ? w.group_scale[g][t + 1] : 0.0f;
          Isa::store_words(Isa::pack(prob * scale, second * second_scale), &w.probs[g][step][lane]);
        }
      }
    }
    store(row_max, &w.row_max[head + lane]);
    store(total, &w.total[head + lane]);
    store(rescale, &w.rescale[lane]);
  }
}

// ---- Values ----------------------------------------------------------------------------------------------

constexpr int kPrefetchSteps = 8;  // from some lines of the next tile to the next ones

// out[kHeads][one panel] = rescale * out + P x values, `values` being the panel's part of the first row.
template <int kHeads>
__attribute__((noinline)) void value_block(float (*out)[kValueDim], const float* rescale, bool first_tile, int steps,
                                           const uint32_t* values, const uint32_t (*probs)[kScoreHeads],
                                           Prefetch* prefetch) {
  Floats acc[kHeads][Isa::kValueVectors];
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 8
    for (int v = 0; v < Isa::kValueVectors; ++v)
      acc[h][v] = first_tile ? Floats{} : load(out[h] + v * kLanes) * rescale[h];
  for (int step = 0; step < steps;) {
    if (prefetch) prefetch->some();
    const int end = step + kPrefetchSteps < steps ? step + kPrefetchSteps : steps;
    for (; step < end; ++step) {
      typename Isa::Words value[Isa::kValueVectors];
      Isa::load_values(values + step * Isa::kPack * kRowStride, kRowStride, value);
#pragma GCC unroll 16
      for (int h = 0; h < kHeads; ++h) {
        const typename Isa::Words prob = Isa::broadcast_word(&probs[step][h]);
#pragma GCC unroll 8
        for (int v = 0; v < Isa::kValueVectors; ++v) acc[h][v] = Isa::dot(acc[h][v], value[v], prob);
      }
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 8
    for (int v = 0; v < Isa::kValueVectors; ++v) store(acc[h][v], out[h] + v * kLanes);
}

template <bool kScaled, typename Unit = Isa>
inline void add_values(int head, int heads, int count, bool first_tile, const TileRows& next, Workspace& w) {
  const int steps = (count + Isa::kPack - 1) / Isa::kPack;
  [[maybe_unused]] typename Unit::Session::Memory& unit = w.unit;
  // Meanwhile the next tile's rows come into the cache: the first heads' products leave time for that.
  const int blocks = (heads + Isa::kValueHeads - 1) / Isa::kValueHeads;
  const int chunks = (steps + kPrefetchSteps - 1) / kPrefetchSteps;
  Prefetch next_rows(next, kPanels * (Unit::kTiles ? 1 : blocks * chunks));
  Prefetch* const prefetch = head == 0 ? &next_rows : nullptr;
  if constexpr (Unit::kTiles) unit.load_probs(w.probs[0][0], kTileSteps, kScaled ? kGroups : 1, heads, steps);
  for (int panel = 0; panel < kPanels; ++panel) {
    const uint32_t* values = w.rows_as_words[0] + panel * kPanel / Isa::kPack;
    const int group = kScaled ? panel * kPanel / (kLatent / kGroups) : 0;
    if constexpr (Unit::kTiles) {
      if (prefetch) prefetch->some();
      unit.add_values(&w.out[head][panel * kPanel], w.rescale, first_tile, values, kRowStride, group, heads, steps);
      continue;
    }
    const auto* probs = w.probs[group];
    const auto add = [&](auto block, int h) {
      block(reinterpret_cast<float (*)[kValueDim]>(&w.out[head + h][panel * kPanel]), w.rescale + h, first_tile, steps,
            values, reinterpret_cast<const uint32_t (*)[kScoreHeads]>(&probs[0][h]), prefetch);
    };
    int h = 0;
    for (; h + Isa::kValueHeads <= heads; h += Isa::kValueHeads) add(value_block<Isa::kValueHeads>, h);
    for (; h + 4 <= heads; h += 4) add(value_block<4>, h);
    for (; h + 2 <= heads; h += 2) add(value_block<2>, h);
    for (; h < heads; ++h) add(value_block<1>, h);
  }
}

// ---- A token ---------------------------------------------------------------------------------------------

template <bool kScaled>
inline void attend_tile(const AttentionProblem& p, int head_begin, int heads, const TileRows& tile, bool first_tile,
                        const TileRows& next, Workspace& w) {
  const float scale = p.scale * kLog2E;  // exponentials are taken to base 2
  const int count = tile.count, words = kScaled ? kRowWords : p.head_dim() / Isa::kPack;
  const bool masked = p.unseen(0) > 0 && tile.behind[count - 1] < p.unseen(0);
  // Rows that the value loop adds beyond `count`, with a P of zero, are zeros. What else the score loop reads there
  // is never used.
  for (int t = count; t % Isa::kValueRows != 0; ++t) __builtin_memset(w.rows_as_words[t], 0, sizeof w.rows_as_words[t]);
  for (int head = 0; head < heads; head += kScoreHeads) {
    const int left = heads - head < kScoreHeads ? heads - head : kScoreHeads;
    const int vectors = (left + kLanes - 1) / kLanes;
    const auto* q = w.q + head / kLanes;
    vectors == 1 ? score_tile<kScaled, 1>(q, words, scale, tile, head == 0, w)
                 : score_tile<kScaled, kScoreVectors>(q, words, scale, tile, head == 0, w);
    if (masked) mask_block(p, head_begin + head, left, tile, w);
    softmax_block<kScaled>(head, vectors, count, first_tile, w);
    add_values<kScaled>(head, left, count, first_tile, next, w);
  }
}

// Attends to a split of a token; leaves the accumulators in the workspace. Returns whether any slot was valid.
inline bool attend(const AttentionProblem& p, const TokenWork& s, Workspace& w) {
  SlotWalk walk(p, s.token, s.tile_begin, s.tile_end, s.tile_slots);
  walk.next(w.tiles[0]);
  bool first_tile = true;
  for (int side = 0; w.tiles[side].count > 0; side ^= 1) {
    const TileRows &tile = w.tiles[side], &next = w.tiles[side ^ 1];
    walk.next(w.tiles[side ^ 1]);
    if (tile.format->scale == Scale::fp32)
      attend_tile<true>(p, s.head_begin, s.heads, tile, first_tile, next, w);
    else
      attend_tile<false>(p, s.head_begin, s.heads, tile, first_tile, next, w);
    first_tile = false;
  }
  return !first_tile;
}

// Writes one head's row of the output, its lse and its max logit. Applies the sink and the values' scale, and rounds.
inline void finish_row(const AttentionProblem& p, int token, int head, const float* acc, float factor, float lse,
                       float max_logit) {
  factor = with_sink(factor, p, head, lse) * p.value_scale;
  uint16_t* out = p.out + p.offset(p.out_strides, token, head);
  const bool f16 = Isa::kPack == 1 && p.tile == TileType::f16_576;
  for (int d = 0; d < kValueDim; d += kLanes) {
    const Floats value = load(acc + d) * factor;
    f16 ? store_f16(value, out + d) : store_bf16(value, out + d);
  }
  p.lse[p.offset(p.lse_strides, token, head)] = lse;
  if (p.max_logits) p.max_logits[p.offset(p.max_strides, token, head)] = max_logit_of(lse, max_logit);
}

// Writes one head's result: to its place in the output, or as a partial result.
inline void finish_head(const AttentionProblem& p, const TokenWork& s, int head, bool any, Workspace& w) {
  const float total = any ? w.total[head] : 0.0f;
  const float row_max = any ? w.row_max[head] * kLn2 : -__builtin_inff();
  const float lse = lse_of(row_max, total), inverse = inverse_of(total);
  if (total == 0.0f) __builtin_memset(w.out[head], 0, sizeof w.out[head]);
  if (s.partial.out) {
    float* out = s.partial.out + static_cast<int64_t>(head) * kValueDim;
    for (int d = 0; d < kValueDim; d += kLanes) store(load(w.out[head] + d) * inverse, out + d);
    s.partial.lse[head] = lse;
    s.partial.max_logits[head] = row_max;
    return;
  }
  finish_row(p, s.token, s.head_begin + head, w.out[head], inverse, lse, row_max);
}

inline void run(const AttentionProblem& p, const TokenWork& s, void* workspace) {
  Workspace& w = *static_cast<Workspace*>(workspace);
  [[maybe_unused]] const Isa::Session session;
  load_q(p, s.token, s.head_begin, s.heads, w);
  const bool any = attend(p, s, w);
  for (int head = 0; head < s.heads; ++head) finish_head(p, s, head, any, w);
}

inline void combine(const AttentionProblem& p, int32_t token, int32_t head, int32_t splits, const Partial& first) {
  float acc[kValueDim];
  const float lse =
      combine_rows(splits, kValueDim, first.out, first.next_split * kValueDim, first.lse, first.next_split, acc);
  float largest = -__builtin_inff();
  for (int split = 0; split < splits; ++split)
    largest = __builtin_fmaxf(largest, first.max_logits[split * first.next_split]);
  finish_row(p, token, head, acc, 1.0f, lse, largest);
}
