// Words of two bf16 numbers, for AVX-512 with BF16 and VBMI. Included after kernel.h and e4m3_to_bf16.h.

struct Bf16Arithmetic {
  struct Session {};
  static constexpr bool kTiles = false;
  static constexpr int kPack = 2;
  static constexpr int kSums = 16;
  using Words = __m512bh;

  static Words load_words(const uint32_t* from) { return (Words)_mm512_loadu_si512(from); }
  static Words broadcast_word(const uint32_t* from) {
    int32_t word;
    __builtin_memcpy(&word, from, 4);
    return (Words)_mm512_set1_epi32(word);
  }
  static Floats dot(Floats sum, Words a, Words b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b); }
  static uint32_t query_word(const uint16_t* from) {
    uint32_t word;
    __builtin_memcpy(&word, from, 4);
    return word;
  }
  static uint32_t query_word(const uint8_t* from) {
    return float_bits(e4m3_to_float(from[0])) >> 16 | (float_bits(e4m3_to_float(from[1])) & 0xffff0000u);
  }

  template <bool kQuantised>
  static void widen_key(const uint8_t* from, uint32_t* words) {
    if constexpr (kQuantised)
      widen_e4m3_to_bf16(from, kIndexDim, words);
    else
      __builtin_memcpy(words, from, 2 * kIndexDim);
  }
};
