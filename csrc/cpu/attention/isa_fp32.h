// Words of one fp32 number: for every CPU without bf16 arithmetic. Included after simd.h.

struct Isa {
  struct Session {
    struct Memory {};
  };
  static constexpr bool kTiles = false;
  static constexpr int kPack = 1;
  static constexpr int kScoreAccumulators = kAccumulators;
  static constexpr int kValueRows = 1;
  static constexpr int kValueVectors = 2;
  static constexpr int kValueHeads = kAccumulators / kValueVectors;
  using Words = Floats;

  static Floats load_words(const uint32_t* from) { return *reinterpret_cast<const FloatsUnaligned*>(from); }
  static void store_words(Floats x, uint32_t* to) { *reinterpret_cast<FloatsUnaligned*>(to) = x; }
  static Floats broadcast_word(const uint32_t* from) {
    int32_t bits;  // adding a float to zeros is an instruction, and these are loops of few others
    __builtin_memcpy(&bits, from, 4);
    return (Floats)(Ints{} + bits);
  }
  static Floats dot(Floats sum, Floats a, Floats b) { return sum + a * b; }
  static Floats pack(Floats first, Floats) { return first; }

  template <Code kCode>
  static Floats widen(const uint8_t* numbers, int first) {
    if constexpr (kCode == Code::e4m3) return widen_e4m3(numbers + first);
    if constexpr (kCode == Code::f16) return widen_f16(numbers + 2 * first);
    return widen_bf16(numbers + 2 * first);
  }

  template <const CacheFormat& kFormat>
  static void widen_row(const uint8_t* row, const uint8_t* scales, uint32_t* words) {
    float rope_scale = 1.0f;
    if constexpr (kFormat.scale == Scale::power) {
      rope_scale = two_to(static_cast<int8_t>(*scales));
      const float scale = rope_scale * two_to(kUsualPower);
      for (int d = 0; d < kFormat.latent; d += kLanes) store_words(widen<kFormat.code>(row, d) * scale, words + d);
    } else if constexpr (kFormat.scale == Scale::ue8m0) {
      for (int d = 0; d < kFormat.latent; d += kFormat.group) {
        const float scale = ue8m0_to_float(scales[d / kFormat.group]);
        for (int i = d; i < d + kFormat.group; i += kLanes) store_words(widen<kFormat.code>(row, i) * scale, words + i);
      }
    } else if constexpr (kFormat.scale == Scale::e4m3) {
      for (int d = 0; d < kFormat.latent; ++d) words[d] = float_bits(nvfp4_value(row, scales, d));
    } else {
      for (int d = 0; d < kFormat.latent; d += kLanes) store_words(widen<kFormat.code>(row, d), words + d);
    }
    for (int d = 0; d < kFormat.rope; d += kLanes)
      store_words(widen<kFormat.rope_code>(row + kFormat.rope_offset(), d) * rope_scale, words + kFormat.latent + d);
  }

  static void load_values(const uint32_t* row, int, Floats (&values)[kValueVectors]) {
#pragma GCC unroll 8
    for (int v = 0; v < kValueVectors; ++v) values[v] = load_words(row + v * kLanes);
  }
};
