// The two rules that turn 16 numbers into a scale byte and 16 codes.
//
// Special cases, the same in both: a scale that rounds to zero makes all codes zero (no -0); NaN does not
// count for the maximum and becomes +6, and a block of nothing but NaN has scale NaN; infinity gives scale
// 448 and +-6.
#pragma once

#include <cmath>

#include "../ptx/convert.cuh"
#include "config.h"

namespace sm120::quantize {

struct Quantized {
  uint32_t scale;     // ue4m3 byte
  uint32_t codes[2];  // sixteen e2m1 codes, lowest nibble first
};

/// The encode scale and what a rule derives from it once a thread.
struct GlobalScale {
  float value;
  float reciprocal;
};

template <Rule kRule>
DEVICE_FN GlobalScale prepare(float value) {
  return {value, kRule == Rule::kReciprocal ? ptx::reciprocal_approximate(value) : 0.0f};
}

template <InputType kType>
DEVICE_FN void unpack(uint32_t pair, float& low, float& high) {
  if constexpr (kType == InputType::kBfloat16) {
    ptx::unpack_bf16x2(pair, low, high);
  } else {
    ptx::unpack_f16x2(pair, low, high);
  }
}

/// The larger magnitude in each half of two registers of pairs, its sign undefined; NaN only where both are.
template <InputType kType>
DEVICE_FN uint32_t larger_pair(uint32_t a, uint32_t b) {
  if constexpr (kType == InputType::kBfloat16) {
    return ptx::max_magnitude_bf16x2(a, b);
  } else {
    return ptx::max_magnitude_f16x2(a, b);
  }
}

/// The largest magnitudes of the lower and of the upper halves of `kPairs` registers.
template <InputType kType, int kPairs>
DEVICE_FN uint32_t largest_pair(const uint32_t (&pairs)[kPairs]) {
  uint32_t largest = pairs[0];
#pragma unroll
  for (int i = 1; i < kPairs; ++i) largest = larger_pair<kType>(largest, pairs[i]);
  return largest;
}

/// The larger |x| of a pair; NaN only if both are.
template <InputType kType>
DEVICE_FN float magnitude_of(uint32_t pair) {
  float low, high;
  unpack<kType>(pair, low, high);
  return fmaxf(fabsf(low), fabsf(high));
}

/// Largest |x| of the block; NaN only if all are.
template <InputType kType>
DEVICE_FN float largest_magnitude(const uint32_t (&pairs)[kBlock / 2]) {
  return magnitude_of<kType>(largest_pair<kType>(pairs));
}

/// Nearest ue4m3 to a non-negative float64, ties to even, at most 448; NaN gives 0x7F.
DEVICE_FN uint32_t exact_ue4m3(double value) {
  if (!(value == value)) return 0x7F;
  if (value >= 448.0) return 0x7E;
  int exponent = -6;  // of the smallest normal; subnormals share its spacing
  double top = 0x1p-5;
  while (value >= top) {
    top *= 2.0;
    ++exponent;
  }
  const double steps = rint(value * (8.0 / (top * 0.5)));  // spacing 2^(exponent - 3), a power of two: exact
  return static_cast<uint32_t>(steps) + static_cast<uint32_t>((exponent + 6) << 3);
}

DEVICE_FN double ue4m3_value(uint32_t byte) {
  const int exponent = static_cast<int>(byte >> 3);
  const double mantissa = static_cast<double>(byte & 7u);
  double scale = 0x1p-9;
  for (int i = 1; i < exponent; ++i) scale *= 2.0;
  return (exponent == 0 ? mantissa : mantissa + 8.0) * scale;
}

/// Nearest e2m1 to numerator / denominator without dividing: midpoint * denominator is exact in float64.
DEVICE_FN uint32_t exact_e2m1(double numerator, double denominator) {
  if (!(numerator == numerator)) return 7;
  const double magnitude = fabs(numerator);
  uint32_t code = 0;
  code += magnitude > 0.25 * denominator;   // a tie goes to the even code: 0
  code += magnitude >= 0.75 * denominator;  // to 2
  code += magnitude > 1.25 * denominator;
  code += magnitude >= 1.75 * denominator;
  code += magnitude > 2.5 * denominator;
  code += magnitude >= 3.5 * denominator;
  code += magnitude > 5.0 * denominator;
  return code | (std::signbit(numerator) ? 8u : 0u);
}

template <InputType kType>
DEVICE_FN Quantized quantize_exact(const uint32_t (&pairs)[kBlock / 2], float global_scale) {
  const double global = static_cast<double>(global_scale);
  const double wanted = static_cast<double>(largest_magnitude<kType>(pairs)) * global / 6.0;
  Quantized out = {exact_ue4m3(wanted), {0u, 0u}};
  if (out.scale == 0u) return out;
  const double scale = out.scale == 0x7Fu ? 1.0 : ue4m3_value(out.scale);  // all NaN: every code is 7 anyway
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    float low, high;
    unpack<kType>(pairs[i], low, high);
    const uint32_t codes = exact_e2m1(static_cast<double>(low) * global, scale) |
                           exact_e2m1(static_cast<double>(high) * global, scale) << 4;
    out.codes[i / 4] |= codes << (8 * (i % 4));
  }
  return out;
}

/// What the reciprocal rule makes of a block's largest magnitude.
struct ReciprocalScale {
  uint32_t byte;  // ue4m3
  float factor;   // that the numbers are multiplied by
  uint32_t mask;  // of the codes: 0 times an infinite factor is no number
};

DEVICE_FN ReciprocalScale reciprocal_scale(float largest, const GlobalScale& global) {
  const float wanted = global.value * (largest * ptx::reciprocal_approximate(6.0f));
  const uint32_t byte = ptx::convert_ue4m3(wanted);
  const float factor = ptx::reciprocal_approximate(ptx::ue4m3_to_float(byte) * global.reciprocal);
  return {byte, factor, byte == 0u ? 0u : 0xFFFFFFFFu};
}

/// Codes of the eight numbers in pairs kFirst .. kFirst + 3.
template <InputType kType, int kFirst, int kPairs>
DEVICE_FN uint32_t reciprocal_codes(const uint32_t (&pairs)[kPairs], const ReciprocalScale& scale) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack<kType>(pairs[kFirst + i], x[2 * i], x[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= scale.factor;
  return ptx::convert_e2m1x8(x) & scale.mask;
}

template <InputType kType>
DEVICE_FN Quantized quantize_reciprocal(const uint32_t (&pairs)[kBlock / 2], const GlobalScale& global) {
  const ReciprocalScale scale = reciprocal_scale(largest_magnitude<kType>(pairs), global);
  return {scale.byte, {reciprocal_codes<kType, 0>(pairs, scale), reciprocal_codes<kType, 4>(pairs, scale)}};
}

template <InputType kType, Rule kRule>
DEVICE_FN Quantized quantize_block(const uint32_t (&pairs)[kBlock / 2], const GlobalScale& global) {
  if constexpr (kRule == Rule::kExact) return quantize_exact<kType>(pairs, global.value);
  return quantize_reciprocal<kType>(pairs, global);
}

}  // namespace sm120::quantize
