// The backward of sparse attention for one instruction set. Each isa_*.cpp includes this inside its anonymous
// namespace, after simd.h and a struct `Isa` as attention/kernel.h describes it.
//
// A query's valid rows are gathered into tiles of kTile. For a tile:
//
//   scores   lanes are heads, as in attention: q and d_out are laid out as [word of the head dim][head], and each word
//            of a row is broadcast against them. P and dS follow, lanes still heads.
//   d_q      lanes are dims: the rows, each times a head's dS
//   a row's contribution: lanes are dims: the queries of all heads times their dS, and d_out times P
//
// P and dS are packed twice: d_q sums over rows, contributions over heads, and the numbers of a word are neighbours
// along the sum.

constexpr int kTile = 64;
constexpr int kRowWords = kHeadDim / Isa::kPack;
constexpr int kValueWords = kValueDim / Isa::kPack;
constexpr int kScoreVectors = 2;  // of heads, that the score loop takes at once
constexpr int kHeadSlots =
    (kMaxBackwardHeads + kScoreVectors * kLanes - 1) / (kScoreVectors * kLanes) * (kScoreVectors * kLanes);
constexpr int kPanel = Isa::kValueVectors * kLanes;  // dims that a pass covers
constexpr int kMatrixRows = Isa::kValueHeads;        // heads or entries that it takes at once
static_assert(kValueDim % kPanel == 0 && kRope % kPanel == 0, "a panel is of values or not");
static_assert(kTile % Isa::kScoreAccumulators == 0 && kTile % kMatrixRows == 0);
static_assert(kHeadSlots % kMatrixRows == 0);

// What a thread works in; it keeps this between calls.
struct Workspace {
  alignas(64) uint32_t q_lanes[kHeadSlots / kLanes][kRowWords][kLanes];
  alignas(64) uint32_t d_out_lanes[kHeadSlots / kLanes][kValueWords][kLanes];
  alignas(64) uint32_t q_rows[kHeadSlots][kRowWords];
  alignas(64) uint32_t d_out_rows[kHeadSlots][kRowWords];  // the stride that load_values knows
  alignas(64) uint32_t rows[kTile][kRowWords];
  alignas(64) float scores[kTile][kHeadSlots];
  alignas(64) float d_probs[kTile][kHeadSlots];
  alignas(64) uint32_t d_scores_by_entry[kTile / Isa::kPack][kHeadSlots];  // a word: dS of kPack entries, of a head
  alignas(64) uint32_t d_scores_by_head[kTile][kHeadSlots / Isa::kPack];   // a word: of kPack heads, of an entry
  alignas(64) uint32_t probs_by_head[kTile][kHeadSlots / Isa::kPack];
  alignas(64) float d_q[kHeadSlots][kHeadDim];
  alignas(64) float lse2[kHeadSlots];
  alignas(64) float delta[kHeadSlots];
  int32_t entry[kTile];  // of the query's list
};

// ---- Loading ---------------------------------------------------------------------------------------------

// bf16 numbers as words.
inline void widen(const uint16_t* from, int numbers, uint32_t* to) {
  if constexpr (Isa::kPack == 2)
    __builtin_memcpy(to, from, 2 * static_cast<size_t>(numbers));
  else
    for (int i = 0; i < numbers; i += kLanes)
      store(widen_bf16(reinterpret_cast<const uint8_t*>(from + i)), reinterpret_cast<float*>(to + i));
}

// Rows of all heads as words, and the same with lanes along heads. Slots without a head are zeros.
template <int kWords>
inline void load_heads(const uint16_t* from, int64_t stride, int heads, int numbers, uint32_t (*rows)[kRowWords],
                       uint32_t (*lanes)[kWords][kLanes]) {
  const int slots = (heads + kLanes - 1) / kLanes * kLanes, words = numbers / Isa::kPack;
  for (int head = 0; head < slots; ++head) {
    if (head < heads)
      widen(from + head * stride, numbers, rows[head]);
    else
      __builtin_memset(rows[head], 0, sizeof rows[head]);
    for (int word = 0; word < words; ++word) lanes[head / kLanes][word][head % kLanes] = rows[head][word];
  }
}

// ---- Scores ----------------------------------------------------------------------------------------------

// to[entry][head] of some rows against kVectors vectors of heads.
template <int kVectors, int kWords>
__attribute__((noinline)) void multiply_rows(const uint32_t (*lanes)[kWords][kLanes], const uint32_t (*rows)[kRowWords],
                                             int words, float (*to)[kHeadSlots]) {
  constexpr int kEntries = Isa::kScoreAccumulators / kVectors;
  Floats acc[kEntries][kVectors];
#pragma GCC unroll 32
  for (int e = 0; e < kEntries; ++e)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[e][v] = Floats{};
  for (int word = 0; word < words; ++word) {
    typename Isa::Words head[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) head[v] = Isa::load_words(lanes[v][word]);
#pragma GCC unroll 32
    for (int e = 0; e < kEntries; ++e) {
      const typename Isa::Words row = Isa::broadcast_word(&rows[e][word]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[e][v] = Isa::dot(acc[e][v], head[v], row);
    }
  }
#pragma GCC unroll 32
  for (int e = 0; e < kEntries; ++e)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(acc[e][v], &to[e][v * kLanes]);
}

template <int kWords>
inline void score(const uint32_t (*lanes)[kWords][kLanes], int words, int count, int vectors, const Workspace& w,
                  float (*to)[kHeadSlots]) {
  for (int v = 0; v < vectors; v += kScoreVectors) {
    const bool one = vectors - v == 1;
    float (*const column)[kHeadSlots] = reinterpret_cast<float (*)[kHeadSlots]>(&to[0][v * kLanes]);
    for (int e = 0; e < count; e += one ? Isa::kScoreAccumulators : Isa::kScoreAccumulators / kScoreVectors)
      one ? multiply_rows<1, kWords>(lanes + v, w.rows + e, words, column + e)
          : multiply_rows<kScoreVectors, kWords>(lanes + v, w.rows + e, words, column + e);
  }
}

// A vector of heads as words along them.
inline void store_by_head(Floats x, int lane, uint32_t* to) {
  if constexpr (Isa::kPack == 2)
    store_bf16(x, reinterpret_cast<uint16_t*>(to) + lane);
  else
    store(x, reinterpret_cast<float*>(to) + lane);
}

// P and dS from scores and d_weights, packed for the loops that follow.
inline void find_factors(const BackwardProblem& p, int count, int vectors, Workspace& w) {
  const float scale2 = p.scale * kLog2E;
  for (int v = 0; v < vectors; ++v) {
    const int lane = v * kLanes;
    const Floats lse2 = load(&w.lse2[lane]), delta = load(&w.delta[lane]);
    for (int e = 0; e < count; e += Isa::kPack) {
      Floats d_score[2] = {};
      for (int i = 0; i < Isa::kPack && e + i < count; ++i) {
        const Floats prob = exp2_of(load(&w.scores[e + i][lane]) * scale2 - lse2);
        d_score[i] = prob * (load(&w.d_probs[e + i][lane]) - delta) * p.scale;
        store_by_head(prob, lane, w.probs_by_head[e + i]);
        store_by_head(d_score[i], lane, w.d_scores_by_head[e + i]);
      }
      Isa::store_words(Isa::pack(d_score[0], d_score[1]), &w.d_scores_by_entry[e / Isa::kPack][lane]);
    }
  }
}

// ---- Gradients -------------------------------------------------------------------------------------------

// acc[kRows][one panel] += factors x values; factors of row m and step s at factors[m * row_stride + s * step_stride].
template <int kRows>
inline __attribute__((always_inline)) void add_products(Floats (&acc)[kRows][Isa::kValueVectors],
                                                        const uint32_t* values, int steps, const uint32_t* factors,
                                                        int row_stride, int step_stride) {
  for (int step = 0; step < steps; ++step) {
    typename Isa::Words value[Isa::kValueVectors];
    Isa::load_values(values + step * Isa::kPack * kRowWords, kRowWords, value);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const typename Isa::Words factor = Isa::broadcast_word(&factors[m * row_stride + step * step_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < Isa::kValueVectors; ++v) acc[m][v] = Isa::dot(acc[m][v], value[v], factor);
    }
  }
}

// d_q of some heads, one panel: adds the tile's rows times dS.
template <int kRows>
__attribute__((noinline)) void add_to_d_q(float (*d_q)[kHeadDim], const uint32_t* values, int steps,
                                          const uint32_t* d_scores) {
  Floats acc[kRows][Isa::kValueVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < Isa::kValueVectors; ++v) acc[m][v] = load(d_q[m] + v * kLanes);
  add_products<kRows>(acc, values, steps, d_scores, 1, kHeadSlots);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < Isa::kValueVectors; ++v) store(acc[m][v], d_q[m] + v * kLanes);
}

// A panel's sums as bf16. What AVX-512's own instruction makes of NaN has other bits, and is as good here.
inline void narrow(const Floats (&acc)[Isa::kValueVectors], uint16_t* to) {
#ifdef __AVX512BF16__
  static_assert(Isa::kValueVectors == 2);
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)acc[1], (__m512)acc[0]));
#else
#pragma GCC unroll 8
  for (int v = 0; v < Isa::kValueVectors; ++v) store_bf16(acc[v], to + v * kLanes);
#endif
}

// The contributions of some entries, one panel. `d_out` is null where the panel's dims are no values.
template <int kRows>
__attribute__((noinline)) void contribute(const uint32_t* q, const uint32_t* d_out, int steps, const uint32_t* d_scores,
                                          const uint32_t* probs, uint16_t* const* to, int dim) {
  Floats acc[kRows][Isa::kValueVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
    for (int v = 0; v < Isa::kValueVectors; ++v) acc[m][v] = Floats{};
  constexpr int kStride = kHeadSlots / Isa::kPack;
  add_products<kRows>(acc, q, steps, d_scores, kStride, 1);
  if (d_out) add_products<kRows>(acc, d_out, steps, probs, kStride, 1);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) narrow(acc[m], to[m] + dim);
}

// ---- A query ---------------------------------------------------------------------------------------------

// Gathers the next rows of the list; the entry to go on from comes back.
inline int gather_rows(const BackwardProblem& p, int query, int at, int end, int& count, Workspace& w) {
  const int32_t* indices = p.lists.indices + query * p.lists.stride;
  for (count = 0; at < end && count < kTile; ++at) {
    if (!p.lists.names(indices[at])) continue;
    w.entry[count] = at;
    widen(p.kv + indices[at] * p.kv_row, p.width, w.rows[count++]);
  }
  // what follows the last row is multiplied with a P of 0
  if (count % Isa::kPack) __builtin_memset(w.rows[count], 0, sizeof w.rows[count]);
  constexpr int kAhead = 16;
  for (int i = at; i < at + kAhead && i < end; ++i)
    if (p.lists.names(indices[i]))
      for (int d = 0; d < p.width; d += 32) __builtin_prefetch(p.kv + indices[i] * p.kv_row + d, 0, 2);
  return at;
}

inline void run(const BackwardProblem& p, int32_t query, void* workspace) {
  Workspace& w = *static_cast<Workspace*>(workspace);
  const int heads = p.heads, vectors = (heads + kLanes - 1) / kLanes;
  const int head_steps = (heads + Isa::kPack - 1) / Isa::kPack;
  load_heads<kRowWords>(p.q.at(query), p.q.head, heads, p.width, w.q_rows, w.q_lanes);
  load_heads<kValueWords>(p.d_out.at(query), p.d_out.head, heads, kValueDim, w.d_out_rows, w.d_out_lanes);
  for (int head = 0; head < vectors * kLanes; ++head) {
    w.lse2[head] = head < heads ? p.lse2[int64_t{query} * heads + head] : __builtin_inff();
    w.delta[head] = head < heads ? p.delta[int64_t{query} * heads + head] : 0.0f;
  }
  for (int head = 0; head < heads; ++head) __builtin_memset(w.d_q[head], 0, sizeof w.d_q[head]);

  const int end = p.lists.entries(query);
  int count;
  for (int at = 0; at = gather_rows(p, query, at, end, count, w), count > 0;) {
    score(w.q_lanes, p.width / Isa::kPack, count, vectors, w, w.scores);
    score(w.d_out_lanes, kValueWords, count, vectors, w, w.d_probs);
    find_factors(p, count, vectors, w);
    uint16_t* to[kTile];
    for (int e = 0; e < count; ++e) to[e] = p.contribution(0, query, w.entry[e]);
    const int entry_steps = (count + Isa::kPack - 1) / Isa::kPack;
    for (int dim = 0; dim < p.width; dim += kPanel) {
      const int word = dim / Isa::kPack;
      const auto add = [&](auto block, int h) {
        block(reinterpret_cast<float (*)[kHeadDim]>(&w.d_q[h][dim]), &w.rows[0][word], entry_steps,
              &w.d_scores_by_entry[0][h]);
      };
      int h = 0;
      for (; h + kMatrixRows <= heads; h += kMatrixRows) add(add_to_d_q<kMatrixRows>, h);
      for (; h < heads; ++h) add(add_to_d_q<1>, h);
      const auto emit = [&](auto block, int e) {
        block(&w.q_rows[0][word], dim < kValueDim ? &w.d_out_rows[0][word] : nullptr, head_steps, w.d_scores_by_head[e],
              w.probs_by_head[e], to + e, dim);
      };
      int e = 0;
      for (; e + kMatrixRows <= count; e += kMatrixRows) emit(contribute<kMatrixRows>, e);
      for (; e < count; ++e) emit(contribute<1>, e);
    }
  }
  for (int head = 0; head < heads; ++head)
    for (int dim = 0; dim < p.width; dim += kLanes) store_bf16(load(&w.d_q[head][dim]), p.d_q.at(query, head) + dim);
}

// ---- The ordered sum -------------------------------------------------------------------------------------

// sum += kPairs contributions, one after the other.
template <int kPairs>
inline void add_rows(float* sum, int width, const uint16_t* const* rows) {
  for (int dim = 0; dim < width; dim += kLanes) {
    Floats total = load(sum + dim);
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) total += widen_bf16(reinterpret_cast<const uint8_t*>(rows[i] + dim));
    store(total, sum + dim);
  }
}

inline void sum_row(const SumProblem& p, int32_t row) {
  const auto clamped = [&](int64_t at) { return at < 0 ? 0 : at > p.total_pairs ? p.total_pairs : at; };
  const bool first = p.first_pair == 0;
  const int64_t begin = clamped(first ? p.begin[row] : p.next[row]), end = clamped(p.begin[row + 1]);
  const auto in_block = [&](int64_t at) {
    return at < end && p.pairs[at] >= p.first_pair && p.pairs[at] < p.first_pair + p.pair_count;
  };
  int64_t last = begin;
  while (in_block(last)) ++last;
  if (p.next) p.next[row] = static_cast<int32_t>(last);
  if (begin == last && !first && !p.d_kv) return;

  alignas(64) float local[kHeadDim];
  float* const sum = p.accumulator ? p.accumulator + int64_t{row} * p.width : local;
  if (first && !p.continues) __builtin_memset(sum, 0, sizeof(float) * static_cast<size_t>(p.width));
  const auto contribution = [&](int64_t i) {
    const int64_t pair = p.pairs[begin + i / p.groups] - p.first_pair;
    return p.contributions + (i % p.groups * p.group_stride + pair) * p.width;
  };
  constexpr int kAtOnce = 4;
  const int64_t count = (last - begin) * p.groups;
  for (int64_t i = 0; i < count;) {
    const uint16_t* rows[kAtOnce];
    const int n = count - i < kAtOnce ? 1 : kAtOnce;
    for (int k = 0; k < n; ++k) rows[k] = contribution(i + k);
    for (int64_t k = i + n; k < i + n + kAtOnce && k < count; ++k)
      for (int dim = 0; dim < p.width; dim += 32) __builtin_prefetch(contribution(k) + dim);
    n == 1 ? add_rows<1>(sum, p.width, rows) : add_rows<kAtOnce>(sum, p.width, rows);
    i += n;
  }
  if (p.d_kv)
    for (int dim = 0; dim < p.width; dim += kLanes) store_bf16(load(sum + dim), p.d_kv + row * p.d_kv_row + dim);
}

inline float dot(const uint16_t* a, const uint16_t* b) {
  Floats sum[4] = {};
  for (int dim = 0; dim < kValueDim; dim += 4 * kLanes)
    for (int i = 0; i < 4; ++i)
      sum[i] += widen_bf16(reinterpret_cast<const uint8_t*>(a + dim + i * kLanes)) *
                widen_bf16(reinterpret_cast<const uint8_t*>(b + dim + i * kLanes));
  const Floats all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += all[lane];
  return total;
}
