// Words of two bf16 numbers, for AVX-512 with BF16 and VBMI. Included after simd.h and e4m3_to_bf16.h.

struct Pairs {
  alignas(64) uint16_t low[32];     // of two vectors of 32 numbers: pair up the first 16 of each
  alignas(64) uint16_t high[32];    // ... the last 16 of each
  alignas(64) uint16_t halves[32];  // of one vector: pair up its two halves

  constexpr Pairs() : low(), high(), halves() {
    for (int i = 0; i < 16; ++i) {
      low[2 * i] = static_cast<uint16_t>(i), low[2 * i + 1] = static_cast<uint16_t>(32 + i);
      high[2 * i] = static_cast<uint16_t>(16 + i), high[2 * i + 1] = static_cast<uint16_t>(48 + i);
      halves[2 * i] = static_cast<uint16_t>(i), halves[2 * i + 1] = static_cast<uint16_t>(16 + i);
    }
  }
};
constexpr Pairs kPairs;

struct Bf16Isa {
  struct Session {
    struct Memory {};
  };
  static constexpr bool kTiles = false;
  static constexpr int kPack = 2;
  static constexpr int kScoreSums = 16;
  static constexpr int kValueRows = 2;
  static constexpr int kValueHeads = 8;
  static constexpr int kValueVectors = 2;
  using Words = __m512bh;

  static Words load_words(const uint32_t* from) { return (Words)_mm512_loadu_si512(from); }
  static void store_words(__m512i x, uint32_t* to) { _mm512_storeu_si512(to, x); }
  static Words broadcast_word(const uint32_t* from) {
    int32_t word;
    __builtin_memcpy(&word, from, 4);
    return (Words)_mm512_set1_epi32(word);
  }
  static Floats dot(Floats sum, Words a, Words b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b); }
  static __m512i pack(Floats first, Floats second) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return _mm512_permutexvar_epi16(_mm512_load_si512(kPairs.halves), halves);
  }

  template <bool kScaled>
  static void widen_row(const uint8_t* row, uint32_t* words) {
    if constexpr (!kScaled) {
      __builtin_memcpy(words, row, kBf16.row_bytes());
      return;
    }
    widen_e4m3_to_bf16(row, kLatent, words);
    __builtin_memcpy(words + kLatent / 2, row + kFp8DsMla.rope_offset(), 2 * kRope);
  }

  // 32 dims of two neighbouring rows: each word holds one dim of both.
  static void load_values(const uint32_t* row, Words (&values)[2]) {
    const __m512i first = _mm512_load_si512(row), second = _mm512_load_si512(row + kHeadDim / 2);
    values[0] = (Words)_mm512_permutex2var_epi16(first, _mm512_load_si512(kPairs.low), second);
    values[1] = (Words)_mm512_permutex2var_epi16(first, _mm512_load_si512(kPairs.high), second);
  }
};
