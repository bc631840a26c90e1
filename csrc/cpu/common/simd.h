// The vectors that the kernels of each instruction set are written in. Each isa_*.cpp includes this once, inside its
// own anonymous namespace and compiled with its own flags, after defining kLanes. GCC and Clang turn these into
// whatever registers the flags allow.
//
// Nothing from the standard library may be used in here: an inline function compiled with AVX-512 flags could
// be the copy that the linker keeps for everybody.

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef float FloatsUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef uint8_t BytesUnaligned __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));
typedef uint16_t ShortsUnaligned __attribute__((vector_size(kLanes * 2), aligned(1), may_alias));

inline Floats load(const float* from) { return *reinterpret_cast<const FloatsUnaligned*>(from); }
inline void store(Floats x, float* to) { *reinterpret_cast<FloatsUnaligned*>(to) = x; }
inline Floats broadcast(float x) { return Floats{} + x; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline Floats widen_bf16(const uint8_t* from) {
  const Shorts bits = *reinterpret_cast<const ShortsUnaligned*>(from);
  return (Floats)(__builtin_convertvector(bits, Ints) << 16);
}

// A latent value of an nvfp4_352 row.
inline float nvfp4_value(const uint8_t* row, const uint8_t* scales, int dim) {
  return e2m1_to_float(row[dim / 2] >> dim % 2 * 4) * e4m3_to_float(scales[nvfp4_scale(dim / kNvfp4.group)]);
}

// See f16_to_float in mla/number.h.
inline Floats widen_f16(const uint8_t* from) {
  const Ints bits = __builtin_convertvector(*reinterpret_cast<const ShortsUnaligned*>(from), Ints);
  const Ints magnitude = bits & 0x7fff;
  const Ints normal = (magnitude << 13) + (112 << 23);
  const Ints subnormal = (Ints)(__builtin_convertvector(magnitude, Floats) * 5.9604644775390625e-8f);
  const Ints wide = magnitude < 0x400 ? subnormal : (magnitude >= 0x7c00 ? normal + (112 << 23) : normal);
  return (Floats)(wide | ((bits & 0x8000) << 16));
}

// See float_to_f16 in mla/number.h.
inline void store_f16(Floats x, uint16_t* to) {
  const Ints bits = (Ints)x, magnitude = bits & 0x7fffffff, sign = (Ints)((Unsigned)bits >> 16) & 0x8000;
  const Ints rounded = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
  const Ints subnormal = (Ints)((Floats)magnitude + 0.5f) & 0x7ff;
  const Ints finite = sign | (magnitude < 0x38800000 ? subnormal : rounded);
  const Ints large = magnitude > 0x7f800000 ? Ints{} + 0x7e00 : sign | 0x7c00;
  *reinterpret_cast<ShortsUnaligned*>(to) = __builtin_convertvector(magnitude >= 0x477ff000 ? large : finite, Shorts);
}

// See float_to_bf16 in mla/number.h.
inline void store_bf16(Floats x, uint16_t* to) {
  const Unsigned bits = (Unsigned)x;
  const Unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Unsigned nan = Unsigned{} + 0x7fc0u;
  const Shorts narrow = __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, Shorts);
  *reinterpret_cast<ShortsUnaligned*>(to) = narrow;
}

// See e4m3_to_float in mla/number.h.
inline Floats widen_e4m3(const uint8_t* from) {
  const Ints byte = __builtin_convertvector(*reinterpret_cast<const BytesUnaligned*>(from), Ints);
  const Ints magnitude = byte & 0x7f;
  const Ints normal = (magnitude << 20) + (120 << 23);
  const Ints subnormal = (Ints)(__builtin_convertvector(magnitude, Floats) * 0.001953125f);
  const Ints bits = magnitude < 8 ? subnormal : (magnitude == 0x7f ? normal | 0x7fffffff : normal);
  return (Floats)(bits | ((byte & 0x80) << 24));
}

// 2^x for x <= 0, with 0 below 2^-126 and NaN kept; relative error under 2e-7. x is split into a whole number
// and a rest within +-1/2, whose power is a polynomial (Taylor in x ln 2, good to 7 terms on that interval).
inline Floats exp2_of(Floats x) {
  const Floats clamped = x < -126.0f ? broadcast(-126.0f) : x;
  const Ints whole = __builtin_convertvector(clamped - 0.5f, Ints);
  const Floats rest = (clamped - __builtin_convertvector(whole, Floats)) * 0.693147180559945f;
  Floats power = broadcast(1.0f / 5040);
  power = power * rest + 1.0f / 720;
  power = power * rest + 1.0f / 120;
  power = power * rest + 1.0f / 24;
  power = power * rest + 1.0f / 6;
  power = power * rest + 0.5f;
  power = power * rest + 1.0f;
  power = power * rest + 1.0f;
  const Floats scaled = power * (Floats)((whole + 127) << 23);
  return x < -126.0f ? Floats{} : scaled;
}
