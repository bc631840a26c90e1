// Scores of the indexer for one instruction set. Each isa_*.cpp includes this inside its anonymous namespace, after
// simd.h and a number kFp32Sums: registers that products of fp32 numbers are summed in.
//
// Keys are converted in tiles, once for all heads of all tokens of the range. Lanes are heads: queries were laid out
// once as [word of the dims][head], and each word of a key is broadcast against them, so nothing is transposed. A score
// is summed in an order that depends on the number of heads alone, and so are its bits.
//
// `Arithmetic` says what a word (4 bytes) is, 2 bf16 or 1 fp32, and multiplies and widens those; in kSums registers, or
// (kTiles) in tiles of a matrix unit. A `Session` of it lives as long as a call works.

constexpr int kTile = 32;  // keys converted together: 16 KB as fp32, which share the L1 cache with as much of queries
constexpr int kPair = 2;   // vectors of heads that a key's words are broadcast against at a time
constexpr int kMaxVectors = kMaxIndexHeads / kLanes;
static_assert(kMaxVectors % kPair == 0);

// What a thread works in; it keeps this between calls.
struct Workspace {
  alignas(64) uint32_t queries[kScoreTokens * kMaxVectors * kIndexDim * kLanes];  // [token][vector][word][head]
  alignas(64) float weights[kScoreTokens][kMaxVectors][kLanes];
  alignas(64) Ints is_head[kMaxVectors];         // all bits set; none where there are no more heads
  alignas(64) uint32_t keys[kTile * kIndexDim];  // [key][word]
  alignas(64) Floats totals[kTile];
  float scale[kTile];
  bool has_key[kTile];  // whether the position has one
};

struct Fp32Arithmetic {
  struct Session {};
  static constexpr bool kTiles = false;
  static constexpr int kPack = 1;
  static constexpr int kSums = kFp32Sums;
  using Words = Floats;

  static Floats load_words(const uint32_t* from) { return *reinterpret_cast<const FloatsUnaligned*>(from); }
  static Floats broadcast_word(const uint32_t* from) {
    float x;
    __builtin_memcpy(&x, from, 4);
    return broadcast(x);
  }
  static Floats dot(Floats sum, Floats a, Floats b) { return sum + a * b; }
  static uint32_t query_word(const float* from) { return float_bits(*from); }
  static uint32_t query_word(const uint16_t* from) { return static_cast<uint32_t>(*from) << 16; }
  static uint32_t query_word(const uint8_t* from) { return float_bits(e4m3_to_float(*from)); }

  template <bool kQuantised>
  static void widen_key(const uint8_t* from, uint32_t* words) {
    for (int d = 0; d < kIndexDim; d += kLanes)
      store(kQuantised ? widen_e4m3(from + d) : widen_bf16(from + 2 * d), reinterpret_cast<float*>(words + d));
  }
};

template <typename Arithmetic>
constexpr int kWords = kIndexDim / Arithmetic::kPack;

constexpr float kMxUnit = 4.0f;  // MXFP4 keys are divided by it, or the largest would be infinite

// The e2m1 numbers in the low four bits of each lane, times twice the scale.
inline Ints e2m1_times(Ints number, float scale) {
  const Ints magnitude = number & 7;
  const Ints twice = magnitude < 4 ? magnitude : (magnitude < 6 ? 2 * magnitude - 4 : 4 * magnitude - 16);
  return (Ints)(__builtin_convertvector(twice, Floats) * scale) | ((number & 8) << 28);
}

// MXFP4 values and their scales as words: bf16 holds every such number, too.
template <typename Arithmetic>
inline void widen_mxfp4(const uint8_t* from, const uint8_t* scales, uint32_t* words) {
  for (int i = 0; i < kIndexDim / 2; i += kLanes) {
    const float scale = ue8m0_to_float(scales[i / (kMxGroup / 2)]) * (0.5f / kMxUnit);
    const Ints pairs = __builtin_convertvector(*reinterpret_cast<const BytesUnaligned*>(from + i), Ints);
    const Ints low = e2m1_times(pairs, scale), high = e2m1_times(pairs >> 4, scale);
    for (int lane = 0; lane < kLanes; ++lane)
      if constexpr (Arithmetic::kPack == 1)
        words[2 * (i + lane)] = low[lane], words[2 * (i + lane) + 1] = high[lane];
      else
        words[i + lane] = static_cast<uint32_t>(low[lane]) >> 16 | (static_cast<uint32_t>(high[lane]) & 0xffff0000u);
  }
}

inline int vectors_of(const IndexProblem& p) { return (p.heads + kLanes - 1) / kLanes; }

template <typename Arithmetic, typename Number>
inline void load_queries(const IndexProblem& p, const ScoreRange& s, Workspace& w) {
  const int vectors = vectors_of(p);
  for (int v = 0; v < vectors; ++v)
    for (int lane = 0; lane < kLanes; ++lane) w.is_head[v][lane] = v * kLanes + lane < p.heads ? -1 : 0;
  for (int t = 0; t < s.tokens; ++t)
    for (int v = 0; v < vectors; ++v)
      for (int lane = 0; lane < kLanes; ++lane) {
        // past the last head, that one again: its results are never read
        const int head = v * kLanes + lane < p.heads ? v * kLanes + lane : p.heads - 1;
        const Number* from =
            static_cast<const Number*>(p.queries) + (s.token + t) * p.query_token + head * p.query_head;
        uint32_t* to = w.queries + int64_t{t * vectors + v} * kWords<Arithmetic> * kLanes + lane;
        for (int word = 0; word < kWords<Arithmetic>; ++word)
          to[word * kLanes] = Arithmetic::query_word(from + word * Arithmetic::kPack);
        w.weights[t][v][lane] = p.weights[(s.token + t) * p.weight_token + head];
      }
}

// Keys [begin, begin + count) of a token's list, as words. A place without a key keeps what was there.
template <typename Arithmetic, KeyNumber kNumber>
inline void load_keys(const IndexProblem& p, int64_t token, int begin, int count, Workspace& w) {
  const int64_t request = p.request[token];
  const bool listed = request >= 0 && request < p.requests;
  const int32_t* table = p.block_table + (listed ? request * p.table_stride : 0);
  constexpr int kKeyBytes = key_value_bytes(kNumber);
  int64_t entry = begin / p.cache.block_size, offset = begin % p.cache.block_size;
  for (int t = 0; t < count; ++t, ++offset) {
    if (offset == p.cache.block_size) ++entry, offset = 0;
    if (p.candidate_blocks.size > 0) {
      const int64_t position = p.position_at(token, begin + t);
      entry = position < 0 ? p.max_blocks : position / p.cache.block_size, offset = position % p.cache.block_size;
    }
    const int64_t block = listed && entry < p.max_blocks ? table[entry] : -1;
    w.has_key[t] = block >= 0 && block < p.cache.blocks;
    if (!w.has_key[t]) continue;
    const uint8_t* data = p.cache.data + block * p.cache.block_stride;
    const uint8_t* values = data + offset * kKeyBytes;
    const uint8_t* scales = data + p.cache.block_size * kKeyBytes + offset * kKeyScaleBytes;
    uint32_t* words = w.keys + t * kWords<Arithmetic>;
    if constexpr (kNumber == KeyNumber::mxfp4) {
      widen_mxfp4<Arithmetic>(values, scales, words);
      w.scale[t] = kMxUnit;
    } else {
      Arithmetic::template widen_key<kNumber == KeyNumber::e4m3>(values, words);
      w.scale[t] = 1.0f;
      if (kNumber == KeyNumber::e4m3) __builtin_memcpy(&w.scale[t], scales, 4);
    }
  }
}

template <typename Arithmetic, int kVectors>
using Sums = Floats[Arithmetic::kSums / kVectors][kVectors];

// Some keys against kVectors vectors of heads. A function of its own, so that the compiler has all registers for it.
template <typename Arithmetic, int kVectors>
__attribute__((noinline)) void multiply(const uint32_t* queries, const uint32_t* keys,
                                        Sums<Arithmetic, kVectors>& result) {
  if constexpr (Arithmetic::kTiles) return Arithmetic::template multiply<kVectors>(queries, keys, result);
  constexpr int kKeys = Arithmetic::kSums / kVectors;
  Floats sum[kKeys][kVectors];
#pragma GCC unroll 32
  for (int t = 0; t < kKeys; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[t][v] = Floats{};
  for (int word = 0; word < kWords<Arithmetic>; ++word) {
    typename Arithmetic::Words heads[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      heads[v] = Arithmetic::load_words(queries + (v * kWords<Arithmetic> + word) * kLanes);
#pragma GCC unroll 32
    for (int t = 0; t < kKeys; ++t) {
      const typename Arithmetic::Words key = Arithmetic::broadcast_word(keys + t * kWords<Arithmetic> + word);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[t][v] = Arithmetic::dot(sum[t][v], heads[v], key);
    }
  }
#pragma GCC unroll 32
  for (int t = 0; t < kKeys; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) result[t][v] = sum[t][v];
}

// Adds kVectors vectors of heads to the totals of the first `count` keys of the tile.
template <typename Arithmetic, int kVectors>
inline void add_heads(int token, int vector, int vectors, int count, Workspace& w) {
  const uint32_t* queries = w.queries + int64_t{token * vectors + vector} * kWords<Arithmetic> * kLanes;
  constexpr int kKeys = Arithmetic::kSums / kVectors;
  static_assert(kTile % kKeys == 0);
  for (int first = 0; first < count; first += kKeys) {
    Sums<Arithmetic, kVectors> sums;
    multiply<Arithmetic, kVectors>(queries, w.keys + first * kWords<Arithmetic>, sums);
    for (int t = 0; t < kKeys; ++t)
      for (int v = 0; v < kVectors; ++v) {
        const Floats score = sums[t][v] * w.scale[first + t];
        const Floats positive = score < 0.0f ? Floats{} : score;  // NaN stays
        const Floats weighted = positive * load(w.weights[token][vector + v]);
        w.totals[first + t] += (Floats)((Ints)weighted & w.is_head[vector + v]);
      }
  }
}

inline float sum_of(Floats x) {
  float lanes[kLanes];
  store(x, lanes);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <typename Arithmetic>
inline void score_tile(const IndexProblem& p, int token, int count, float* scores, Workspace& w) {
  const int vectors = vectors_of(p);
  for (int t = 0; t < kTile; ++t) w.totals[t] = Floats{};
  int v = 0;
  for (; v + kPair <= vectors; v += kPair) add_heads<Arithmetic, kPair>(token, v, vectors, count, w);
  if (v < vectors) add_heads<Arithmetic, 1>(token, v, vectors, count, w);
  for (int t = 0; t < count; ++t) scores[t] = w.has_key[t] ? sum_of(w.totals[t]) : -__builtin_inff();
}

// `Number` is what queries are: float, uint16_t for bf16 or uint8_t for e4m3.
template <typename Arithmetic, typename Number>
inline void score_with(const IndexProblem& p, const ScoreRange& s, Workspace& w) {
  [[maybe_unused]] const typename Arithmetic::Session session;
  load_queries<Arithmetic, Number>(p, s, w);
  for (int begin = s.begin; begin < s.end; begin += kTile) {
    const int count = s.end - begin < kTile ? s.end - begin : kTile;
    switch (p.cache.number) {
      case KeyNumber::bf16:
        load_keys<Arithmetic, KeyNumber::bf16>(p, s.token, begin, count, w);
        break;
      case KeyNumber::e4m3:
        load_keys<Arithmetic, KeyNumber::e4m3>(p, s.token, begin, count, w);
        break;
      case KeyNumber::mxfp4:
        load_keys<Arithmetic, KeyNumber::mxfp4>(p, s.token, begin, count, w);
    }
    for (int t = 0; t < s.tokens; ++t) {
      const int64_t seen = int64_t{p.length[s.token + t]} - begin;
      float* scores = s.scores + t * s.score_token + (begin - s.begin);
      if (seen > 0) score_tile<Arithmetic>(p, t, seen < count ? static_cast<int>(seen) : count, scores, w);
    }
  }
}

// What an instruction set's kernel does; ForBf16 is its arithmetic for queries in bf16, and in e4m3, which bf16 holds.
template <typename ForBf16>
void score(const IndexProblem& problem, const ScoreRange& range, void* workspace) {
  Workspace& w = *static_cast<Workspace*>(workspace);
  switch (problem.query_number) {
    case QueryNumber::fp32:
      return score_with<Fp32Arithmetic, float>(problem, range, w);
    case QueryNumber::bf16:
      return score_with<ForBf16, uint16_t>(problem, range, w);
    case QueryNumber::e4m3:
      return score_with<ForBf16, uint8_t>(problem, range, w);
  }
}
