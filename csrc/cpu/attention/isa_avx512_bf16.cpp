// AVX-512 with bf16 dot products and byte permutes (VBMI): Zen 4 and later, Sapphire Rapids and later. Products
// of bf16 numbers are exact in fp32, and so is their conversion from e4m3.
#include <immintrin.h>

#include <cstdint>

#include "cpu/attention/attention.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
#include "cpu/attention/simd.h"
#include "cpu/merge_rows.h"

// e4m3 to bf16 by table: the 7 bits below the sign choose the upper and the lower byte.
struct Tables {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
  alignas(64) uint16_t pairs_low[32];     // of two vectors of 32 numbers: pair up the first 16 of each
  alignas(64) uint16_t pairs_high[32];    // ... the last 16 of each
  alignas(64) uint16_t pairs_halves[32];  // of one vector: pair up its two halves

  constexpr Tables() : high(), low(), pairs_low(), pairs_high(), pairs_halves() {
    for (int code = 0; code < 128; ++code) {
      int bits = (code << 4) + (120 << 7);
      if (code == 0x7f) bits = 0x7fff;
      if (code < 8) {  // code * 2^-9, normalised
        int exponent = 127 - 9, mantissa = code << 7;
        while (code && mantissa >= 0x100) mantissa >>= 1, ++exponent;
        bits = code ? (exponent << 7) + (mantissa - 0x80) : 0;
      }
      high[code] = static_cast<uint8_t>(bits >> 8);
      low[code] = static_cast<uint8_t>(bits & 0xff);
    }
    for (int i = 0; i < 16; ++i) {
      pairs_low[2 * i] = static_cast<uint16_t>(i), pairs_low[2 * i + 1] = static_cast<uint16_t>(32 + i);
      pairs_high[2 * i] = static_cast<uint16_t>(16 + i), pairs_high[2 * i + 1] = static_cast<uint16_t>(48 + i);
      pairs_halves[2 * i] = static_cast<uint16_t>(i), pairs_halves[2 * i + 1] = static_cast<uint16_t>(16 + i);
    }
  }
};
constexpr Tables kTables;

struct Isa {
  static constexpr int kPack = 2;
  static constexpr int kScoreSums = 16;
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
    return _mm512_permutexvar_epi16(_mm512_load_si512(kTables.pairs_halves), halves);
  }

  template <bool kScaled>
  static void widen_row(const uint8_t* row, uint32_t* words) {
    if constexpr (!kScaled) {
      __builtin_memcpy(words, row, kBf16.row_bytes());
      return;
    }
    const __m512i high0 = _mm512_load_si512(kTables.high), high1 = _mm512_load_si512(kTables.high + 64);
    const __m512i low0 = _mm512_load_si512(kTables.low), low1 = _mm512_load_si512(kTables.low + 64);
    // unpacking works within 128-bit lanes; this order of the input's 8-byte pieces makes its result straight
    const __m512i straighten = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    for (int d = 0; d < kLatent; d += 64) {
      const __m512i codes = _mm512_permutexvar_epi64(straighten, _mm512_loadu_si512(row + d));
      const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
      const __m512i magnitude = _mm512_permutex2var_epi8(high0, codes, high1);
      const __m512i high = _mm512_ternarylogic_epi64(magnitude, codes, _mm512_set1_epi8(-128), 0xf8);  // a | (b & c)
      _mm512_storeu_si512(words + d / 2, _mm512_unpacklo_epi8(low, high));
      _mm512_storeu_si512(words + d / 2 + 16, _mm512_unpackhi_epi8(low, high));
    }
    __builtin_memcpy(words + kLatent / 2, row + kFp8DsMla.rope_offset(), 2 * kRope);
  }

  // 32 dims of two neighbouring rows: each word holds one dim of both.
  static void load_values(const uint32_t* row, Words (&values)[2]) {
    const __m512i first = _mm512_load_si512(row), second = _mm512_load_si512(row + kHeadDim / 2);
    values[0] = (Words)_mm512_permutex2var_epi16(first, _mm512_load_si512(kTables.pairs_low), second);
    values[1] = (Words)_mm512_permutex2var_epi16(first, _mm512_load_si512(kTables.pairs_high), second);
  }
};
#include "cpu/attention/kernel.h"
}  // namespace

const AttentionKernel kAvx512Bf16Kernel{"avx512_bf16", "AVX-512 F, BW, DQ, VL, BF16 and VBMI", sizeof(Workspace), run,
                                        merge};

}  // namespace mla::cpu
