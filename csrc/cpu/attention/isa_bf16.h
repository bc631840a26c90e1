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
  static constexpr int kScoreAccumulators = 16;
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

  template <const CacheFormat& kFormat>
  static void widen_row(const uint8_t* row, const uint8_t* scales, uint32_t* words) {
    static_assert(kFormat.code != Code::f16 && kFormat.rope_code != Code::f16, "fp16 numbers are no bf16 ones");
    if constexpr (kFormat.code == Code::bf16) {
      // memcpy would become a string instruction, which takes twice as long
      for (int at = 0; at < kFormat.row_bytes(); at += 64)
        _mm512_store_si512(words + at / 4, _mm512_loadu_si512(row + at));
      return;
    }
    if constexpr (kFormat.scale == Scale::e4m3)  // exact
      for (int d = 0; d < kFormat.latent; d += 2)
        words[d / 2] =
            float_bits(nvfp4_value(row, scales, d)) >> 16 | (float_bits(nvfp4_value(row, scales, d + 1)) & 0xffff0000u);
    else
      widen_e4m3_to_bf16(row, kFormat.latent, words);
    if constexpr (kFormat.scale == Scale::ue8m0)
      for (int d = 0; d < kFormat.latent; d += 32)
        scale_words(ue8m0_to_float(scales[d / kFormat.group]), words + d / 2);
    uint32_t* const rope = words + kFormat.latent / 2;
    if constexpr (kFormat.rope_code == Code::e4m3)
      widen_e4m3_to_bf16(row + kFormat.rope_offset(), kFormat.rope, rope);
    else
      __builtin_memcpy(rope, row + kFormat.rope_offset(), 2 * kFormat.rope);
  }

  // 32 numbers times a power of two, which is exact for e4m3 numbers unless the result is subnormal.
  static void scale_words(float scale, uint32_t* words) {
    const __m512i pairs = _mm512_loadu_si512(words), upper = _mm512_set1_epi32(0xffff0000);
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512i first = (__m512i)_mm512_mul_ps((__m512)_mm512_slli_epi32(pairs, 16), factor);
    const __m512i second = (__m512i)_mm512_mul_ps((__m512)_mm512_and_si512(pairs, upper), factor);
    // upper ? second : first >> 16
    store_words(_mm512_ternarylogic_epi32(upper, second, _mm512_srli_epi32(first, 16), 0xca), words);
  }

  // 32 dims of two neighbouring rows: each word holds one dim of both.
  static void load_values(const uint32_t* row, int row_stride, Words (&values)[2]) {
    const __m512i first = _mm512_load_si512(row), second = _mm512_load_si512(row + row_stride);
    values[0] = (Words)_mm512_permutex2var_epi16(first, _mm512_load_si512(kPairs.low), second);
    values[1] = (Words)_mm512_permutex2var_epi16(first, _mm512_load_si512(kPairs.high), second);
  }
};
