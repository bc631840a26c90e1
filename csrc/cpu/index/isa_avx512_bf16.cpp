// AVX-512 with bf16 dot products and byte permutes (VBMI): Zen 4 and later, Sapphire Rapids and later. For queries in
// bf16; those in fp32 are multiplied as fp32.
#include <immintrin.h>

#include <cstdint>

#include "cpu/index/index.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
constexpr int kSums = 16;
#include "cpu/simd.h"
#include "cpu/e4m3_to_bf16.h"
#include "cpu/index/kernel.h"

struct Bf16Arithmetic {
  static constexpr int kPack = 2;
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

  template <bool kCodes>
  static void widen_key(const uint8_t* from, uint32_t* words) {
    if constexpr (kCodes)
      widen_e4m3_to_bf16(from, kIndexDim, words);
    else
      __builtin_memcpy(words, from, 2 * kIndexDim);
  }
};

void score(const IndexScoresProblem& problem, const ScoreStretch& stretch, void* workspace) {
  Workspace& w = *static_cast<Workspace*>(workspace);
  problem.queries_fp32 ? score_with<Fp32Arithmetic, float>(problem, stretch, w)
                       : score_with<Bf16Arithmetic, uint16_t>(problem, stretch, w);
}
}  // namespace

const IndexKernel kAvx512Bf16IndexKernel{sizeof(Workspace), score};

}  // namespace mla::cpu
