// Number formats of the emulation.
#include <cmath>
#include <cstring>
#include <limits>

#include "instructions.h"

namespace emu {

float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if (std::isnan(value)) return 0x7FFF;
  const uint32_t round = 0x7FFFu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((bits + round) >> 16);
}

uint16_t float_to_f16(float value) {
  const auto sign = static_cast<uint16_t>((float_to_bits(value) >> 16) & 0x8000u);
  if (std::isnan(value)) return 0x7FFF;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520.0) return sign | 0x7C00u;
  // Quantum of the binade: 2^-24 below 2^-14, else 2^(exponent - 10). rint rounds half to even.
  const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  const double steps = std::rint(std::ldexp(magnitude, 10 - exponent));
  const auto code = static_cast<uint32_t>(steps) + (static_cast<uint32_t>(exponent + 14) << 10);
  return static_cast<uint16_t>(sign | code);
}

float f16_to_float(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double magnitude;
  if (exponent == 31) {
    magnitude = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -24);
  } else {
    magnitude = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
}

double e2m1_to_double(uint32_t code) {
  static const double kMagnitude[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  const double magnitude = kMagnitude[code & 7u];
  return code & 8u ? -magnitude : magnitude;
}

double ue4m3_to_double(uint32_t byte) {
  const uint32_t exponent = (byte >> 3) & 15u;
  const uint32_t mantissa = byte & 7u;
  if ((byte & 0x7Fu) == 0x7Fu) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return std::ldexp(static_cast<double>(mantissa), -9);
  return std::ldexp(8.0 + static_cast<double>(mantissa), static_cast<int>(exponent) - 10);
}

// Both search their tables: nearest value, a tie to the even code. Everything above the last value is equally
// far from all of them as soon as float64 has no digits for the difference.
static uint32_t nearest(double magnitude, double (*value)(uint32_t), uint32_t last) {
  if (magnitude >= value(last)) return last;
  uint32_t best = 0;
  for (uint32_t code = 1; code <= last; ++code) {
    const double old_distance = std::fabs(magnitude - value(best));
    const double distance = std::fabs(magnitude - value(code));
    if (distance < old_distance || (distance == old_distance && code % 2 == 0)) best = code;
  }
  return best;
}

uint32_t float_to_e4m3(float value) {
  if (std::isnan(value)) return 0x7F;
  return nearest(static_cast<double>(value), ue4m3_to_double, 0x7E);
}

uint32_t float_to_e2m1(float value) {
  if (std::isnan(value)) return 7;
  const uint32_t sign = std::signbit(value) ? 8u : 0u;
  return sign | nearest(std::fabs(static_cast<double>(value)), e2m1_to_double, 7);
}

}  // namespace emu
