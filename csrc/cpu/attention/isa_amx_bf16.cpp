// AMX: Sapphire Rapids and later.
#include <immintrin.h>

#include <cstdint>

#include "cpu/attention/attention.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
#include "cpu/common/simd.h"
#include "cpu/combine/combine_rows.h"

#include "cpu/common/e4m3_to_bf16.h"

#include "cpu/attention/isa_bf16.h"

#include "cpu/common/amx.h"

#include "cpu/attention/isa_amx_values.h"

struct Isa : Bf16Isa {
  struct Session : TileSession {
    using Memory = TileValues;
  };
  static constexpr bool kTiles = true;
  static constexpr int kScoreAccumulators = 32;
  static constexpr int kValueRows = TileValues::kRows;

  template <int kVectors>
  static void multiply_rows(const uint32_t (*q)[16], int q_words, const uint32_t* rows, int row_words, int words,
                            Floats (&result)[32 / kVectors][kVectors]) {
    multiply_tiles<kVectors>(q, q_words, rows, row_words, words, result);
  }
};
#include "cpu/attention/kernel.h"
}  // namespace

const AttentionKernel kAmxBf16Kernel{
    "amx_bf16", "AMX BF16 besides AVX-512 F, BW, DQ, VL, BF16 and VBMI", false, sizeof(Workspace), run, combine};

}  // namespace mla::cpu
