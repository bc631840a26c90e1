// Words of one fp32 number: for every CPU without bf16 arithmetic. Included after simd.h.

struct Isa {
  struct Session {
    struct Memory {};
  };
  static constexpr bool kTiles = false;
  static constexpr int kPack = 1;
  static constexpr int kScoreSums = kSums;
  static constexpr int kValueRows = 1;
  static constexpr int kValueHeads = 4;
  static constexpr int kValueVectors = kSums / 4;
  using Words = Floats;

  static Floats load_words(const uint32_t* from) { return *reinterpret_cast<const FloatsUnaligned*>(from); }
  static void store_words(Floats x, uint32_t* to) { *reinterpret_cast<FloatsUnaligned*>(to) = x; }
  static Floats broadcast_word(const uint32_t* from) {
    float x;
    __builtin_memcpy(&x, from, 4);
    return broadcast(x);
  }
  static Floats dot(Floats sum, Floats a, Floats b) { return sum + a * b; }
  static Floats pack(Floats first, Floats) { return first; }

  template <bool kScaled>
  static void widen_row(const uint8_t* row, uint32_t* words) {
    const CacheFormat& format = kScaled ? kFp8DsMla : kBf16;
    for (int d = 0; d < kLatent; d += kLanes)
      store_words(kScaled ? widen_e4m3(row + d) : widen_bf16(row + 2 * d), words + d);
    for (int d = 0; d < kRope; d += kLanes)
      store_words(widen_bf16(row + format.rope_offset() + 2 * d), words + kLatent + d);
  }

  static void load_values(const uint32_t* row, Floats (&values)[kValueVectors]) {
#pragma GCC unroll 8
    for (int v = 0; v < kValueVectors; ++v) values[v] = load_words(row + v * kLanes);
  }
};
