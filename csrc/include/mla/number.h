// bf16, fp16, e4m3 and ue8m0 as bit patterns, and the rule by which a group of values gets its scale.
// Plain integer and fp32 arithmetic, so that a CPU and a GPU produce the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "mla/platform.h"

namespace mla {

constexpr float kLog2E = 1.44269504088896f;
constexpr float kLn2 = 0.693147180559945f;

constexpr float kE4m3Max = 448.0f;
constexpr float kFloatMax = 3.402823466e+38f;
constexpr float kFloatMinNormal = 1.175494351e-38f;

MLA_HOST_DEVICE uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

MLA_HOST_DEVICE float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

MLA_HOST_DEVICE float bf16_to_float(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }

// One of many numbers, which are fp32 or else bf16.
MLA_HOST_DEVICE float number_at(const void* numbers, bool fp32, int64_t at) {
  return fp32 ? static_cast<const float*>(numbers)[at] : bf16_to_float(static_cast<const uint16_t*>(numbers)[at]);
}

// Round to nearest, ties to even; NaN becomes the quiet NaN 0x7fc0.
MLA_HOST_DEVICE uint16_t float_to_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// NaN keeps its payload.
MLA_HOST_DEVICE float f16_to_float(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude < 0x400u) {  // subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return bits_float(float_bits(value) | sign);
  }
  return bits_float(sign | ((magnitude << 13) + (112u << 23)));
}

// Round to nearest, ties to even; what rounds beyond 65504 becomes infinite; NaN becomes 0x7e00 whatever its sign.
MLA_HOST_DEVICE uint16_t float_to_f16(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  if (magnitude > 0x7f800000u) return 0x7e00;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 leaves a multiple of 2^-24 in the low mantissa bits
    const float shifted = bits_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) & 0x7ffu));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

MLA_HOST_DEVICE float e4m3_to_float(uint8_t byte) {
  const uint32_t magnitude = byte & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24;
  if (magnitude == 0x7fu) return bits_float(sign | 0x7fffffffu);
  if (magnitude < 8u) {  // subnormal: a multiple of 2^-9
    const float value = static_cast<float>(magnitude) * 0.001953125f;
    return bits_float(float_bits(value) | sign);
  }
  return bits_float(sign | ((magnitude << 20) + (120u << 23)));
}

// Round to nearest, ties to even, saturating at +-448; NaN becomes 0x7f whatever its sign.
MLA_HOST_DEVICE uint8_t float_to_e4m3(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and more
  if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 leaves a multiple of 2^-9 in the low mantissa bits
    const float shifted = bits_float(magnitude) + 16384.0f;
    return static_cast<uint8_t>(sign | (float_bits(shifted) & 0xffu));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

// e2m1: 0, 1/2, 1, 3/2, 2, 3, 4 and 6, with a sign, in the lower four bits.
MLA_HOST_DEVICE float e2m1_to_float(uint32_t number) {
  const uint32_t exponent = number >> 1 & 3u, mantissa = number & 1u;
  const auto half = static_cast<float>(exponent ? (2u + mantissa) << (exponent - 1) : mantissa);
  return bits_float(float_bits(half * 0.5f) | (number & 8u) << 28);
}

// Round to nearest, ties to even, saturating at +-6, as NaN becomes 6: what Blackwell's instruction does.
MLA_HOST_DEVICE uint32_t float_to_e2m1(float x) {
  const float size = bits_float(float_bits(x) & 0x7fffffffu);
  const uint32_t sign = x == x ? float_bits(x) >> 28 & 8u : 0u;
  return sign | (!(size <= 0.25f) + !(size < 0.75f) + !(size <= 1.25f) + !(size < 1.75f) + !(size <= 2.5f) +
                 !(size < 3.5f) + !(size <= 5.0f));
}

// The scale of a group of e2m1 numbers whose largest magnitude is `amax` (NaN left out).
MLA_HOST_DEVICE uint8_t nvfp4_group_scale(float amax) {
  const float quotient = amax * (1.0f / 6.0f);
  return float_to_e4m3(quotient > 0.001953125f ? quotient : 0.001953125f);  // 2^-9, the smallest
}

// A byte that is a power of two: 2^(byte - 127), and NaN for 255.
MLA_HOST_DEVICE float ue8m0_to_float(uint8_t byte) {
  if (byte == 0xffu) return bits_float(0x7fc00000u);
  return bits_float(byte == 0 ? 0x00400000u : static_cast<uint32_t>(byte) << 23);  // 2^-127 is subnormal
}

// The byte of a power of two from 2^-126 to 2^127, as group_scale() makes them.
MLA_HOST_DEVICE uint8_t power_to_ue8m0(float power) { return static_cast<uint8_t>(float_bits(power) >> 23); }

// The scale of a group whose largest magnitude is `amax` (NaN left out): amax / 448, never below the smallest
// normal number, so that a group of zeros has a usable scale. An infinite amax counts as the largest finite
// number: infinities saturate at 448 times that scale, and ordinary numbers become zero.
// `power_of_two` rounds the scale up to a power of two.
MLA_HOST_DEVICE float group_scale(float amax, bool power_of_two) {
  const float finite = amax > kFloatMax ? kFloatMax : amax;
  const float quotient = finite / kE4m3Max;
  const float scale = quotient > kFloatMinNormal ? quotient : kFloatMinNormal;
  if (!power_of_two) return scale;
  return bits_float((float_bits(scale) + 0x7fffffu) & 0xff800000u);
}

// fp8_ds_mla rows are multiplied as f16 numbers: divided by 2^kUsualPower where f16 then holds all that matters of
// them: 448 times the largest scale, and of numbers 2^14 times smaller than that product still as much as e4m3 does.
// Rope is not divided by that: of queries it is, by its inverse.
constexpr int kUsualPower = -8, kLowestPower = -13, kHighestPower = -1;
constexpr float kUsualFactor = 1.0f / (1 << -kUsualPower);

// log2 of a power of two above a magnitude, kept where both it and its inverse, times what they are multiplied with,
// are fp32 numbers.
MLA_HOST_DEVICE int power_above(float magnitude) {
  const int power = static_cast<int>(float_bits(magnitude) >> 23) - 126;
  return power < -60 ? -60 : power > 60 ? 60 : power;
}

// The power of two that a row whose scales' largest magnitude this is gets besides the usual one: 0, or what brings
// the largest scale to 1/2 to 1.
MLA_HOST_DEVICE int excess_power(float largest_scale) {
  const int above = power_above(largest_scale);
  const bool nothing = largest_scale <= kFloatMinNormal;  // a row of zeros
  return (above >= kLowestPower && above <= kHighestPower) || nothing ? 0 : above - kUsualPower;
}

// m64 divides nvfp4_352 rows by this: the factor that makes bf16 of e2m1 bits, 2^126, times a scale of up
// to 448, is then a bf16 number.
constexpr float kNvfp4Factor = 256.0f;
// swap_ab divides them by this: e4m3's exponents are larger than those of the same bits of e2m1.
constexpr float kNvfp4Lift = 64.0f;

// 2^power for powers from -126 to 127.
MLA_HOST_DEVICE float two_to(int power) { return bits_float(static_cast<uint32_t>(127 + power) << 23); }

// The ue8m0 scale of a group of e2m1 numbers whose largest magnitude is `amax` (NaN left out): the power of two from
// amax / 6 on. An infinite amax counts as the largest finite number.
MLA_HOST_DEVICE uint8_t mxfp4_group_scale(float amax) {
  const float quotient = (amax > kFloatMax ? kFloatMax : amax) * (1.0f / 6.0f);
  const uint32_t bits = float_bits(quotient > kFloatMinNormal ? quotient : kFloatMinNormal);
  return static_cast<uint8_t>((bits + 0x7fffffu) >> 23);
}

// One over a power of two from 2^-126 to 2^126.
MLA_HOST_DEVICE float inverse_of_power(float power) { return bits_float((254u << 23) - float_bits(power)); }

}  // namespace mla
