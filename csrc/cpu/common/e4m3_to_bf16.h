// e4m3 to bf16 with AVX-512 VBMI, by table: the 7 bits below the sign choose the upper and the lower byte. Like simd.h
// this is included inside the anonymous namespace of whoever needs it.

struct E4m3Tables {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];

  constexpr E4m3Tables() : high(), low() {
    for (int byte = 0; byte < 128; ++byte) {
      int bits = (byte << 4) + (120 << 7);
      if (byte == 0x7f) bits = 0x7fff;
      if (byte < 8) {  // byte * 2^-9, normalised
        int exponent = 127 - 9, mantissa = byte << 7;
        while (byte && mantissa >= 0x100) mantissa >>= 1, ++exponent;
        bits = byte ? (exponent << 7) + (mantissa - 0x80) : 0;
      }
      high[byte] = static_cast<uint8_t>(bits >> 8);
      low[byte] = static_cast<uint8_t>(bits & 0xff);
    }
  }
};
constexpr E4m3Tables kE4m3Tables;

// `count` bytes, a multiple of 64, as words of two neighbours.
inline void widen_e4m3_to_bf16(const uint8_t* from, int count, uint32_t* words) {
  const __m512i high0 = _mm512_load_si512(kE4m3Tables.high), high1 = _mm512_load_si512(kE4m3Tables.high + 64);
  const __m512i low0 = _mm512_load_si512(kE4m3Tables.low), low1 = _mm512_load_si512(kE4m3Tables.low + 64);
  // unpacking works within 128-bit lanes; this order of the input's 8-byte pieces makes its result straight
  const __m512i straighten = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  for (int d = 0; d < count; d += 64) {
    const __m512i bytes = _mm512_permutexvar_epi64(straighten, _mm512_loadu_si512(from + d));
    const __m512i low = _mm512_permutex2var_epi8(low0, bytes, low1);
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, bytes, high1);
    const __m512i high = _mm512_ternarylogic_epi64(magnitude, bytes, _mm512_set1_epi8(-128), 0xf8);  // a | (b & c)
    _mm512_storeu_si512(words + d / 2, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(words + d / 2 + 16, _mm512_unpackhi_epi8(low, high));
  }
}
