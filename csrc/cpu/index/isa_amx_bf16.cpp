// AMX: Sapphire Rapids and later. For queries in bf16; those in fp32 are multiplied as fp32, by AVX-512.
#include <immintrin.h>

#include <cstdint>

#include "cpu/index/index.h"
#include "mla/number.h"

namespace mla::cpu {
namespace {
constexpr int kLanes = 16;
constexpr int kFp32Sums = 16;
#include "cpu/common/simd.h"
#include "cpu/common/e4m3_to_bf16.h"
#include "cpu/common/amx.h"
#include "cpu/index/kernel.h"

#include "cpu/index/bf16_arithmetic.h"

struct TileArithmetic : Bf16Arithmetic {
  using Session = TileSession;
  static constexpr bool kTiles = true;
  static constexpr int kSums = 32;

  template <int kVectors>
  static void multiply(const uint32_t* queries, const uint32_t* keys, Floats (&result)[32 / kVectors][kVectors]) {
    constexpr int kWords = kIndexDim / kPack;
    multiply_tiles<kVectors>(reinterpret_cast<const uint32_t (*)[kLanes]>(queries), kWords, keys, kWords, kWords,
                             result);
  }
};
}  // namespace

const IndexKernel kAmxBf16IndexKernel{sizeof(Workspace), score<TileArithmetic>};

}  // namespace mla::cpu
