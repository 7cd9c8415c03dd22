// Conversions between float32 and the 16-bit, 8-bit and 4-bit types, round to nearest even, and the maximum
// of packed 16-bit numbers.
#pragma once

#include "e2m1_decoded.cuh"
#include "target.cuh"

namespace sm120::ptx {

/// {low, high} as two bf16 in one register; `low` is the lower address in memory.
DEVICE_FN uint32_t pack_bf16x2(float low, float high) {
#if defined(SM120_EMULATED)
  return emu::float_to_bf16(low) | (static_cast<uint32_t>(emu::float_to_bf16(high)) << 16);
#else
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

DEVICE_FN uint32_t pack_f16x2(float low, float high) {
#if defined(SM120_EMULATED)
  return emu::float_to_f16(low) | (static_cast<uint32_t>(emu::float_to_f16(high)) << 16);
#else
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

/// The two 16-bit values of a register as float32.
DEVICE_FN void unpack_bf16x2(uint32_t packed, float& low, float& high) {
#if defined(SM120_EMULATED)
  low = emu::bits_to_float(packed << 16);
  high = emu::bits_to_float(packed & 0xFFFF0000u);
#elif defined(__CUDA_ARCH__)
  low = __uint_as_float(packed << 16);
  high = __uint_as_float(packed & 0xFFFF0000u);
#endif
}

DEVICE_FN void unpack_f16x2(uint32_t packed, float& low, float& high) {
#if defined(SM120_EMULATED)
  low = emu::f16_to_float(static_cast<uint16_t>(packed));
  high = emu::f16_to_float(static_cast<uint16_t>(packed >> 16));
#else
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high)
      : "r"(packed));
#endif
}

/// 1 / x to about one unit in the last place, subnormals flushed.
DEVICE_FN float reciprocal_approximate(float x) {
#if defined(SM120_EMULATED)
  return 1.0f / x;
#else
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

/// Nearest e4m3 byte to a non-negative float, ties to even, at most 448; NaN gives 0x7F.
DEVICE_FN uint32_t convert_ue4m3(float value) {
#if defined(SM120_EMULATED)
  return emu::float_to_e4m3(value);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t byte;
  asm("{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, %1, %2; cvt.u32.u16 %0, pair; }"
      : "=r"(byte)
      : "f"(0.0f), "f"(value));
  return byte & 0x7Fu;
#elif defined(__CUDA_ARCH__)
  if (!(value == value)) return 0x7F;
  if (value >= 448.0f) return 0x7E;
  if (value < 0x1p-6f) return static_cast<uint32_t>(rintf(value * 512.0f));
  const uint32_t bits =
      __float_as_uint(value);  // drop 20 mantissa bits to nearest even, then change the bias
  return ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
#else
  return 0;
#endif
}

DEVICE_FN float ue4m3_to_float(uint32_t byte) {
#if defined(SM120_EMULATED)
  return static_cast<float>(emu::ue4m3_to_double(byte));
#elif defined(__CUDA_ARCH__)
  if (byte == 0x7Fu) return __uint_as_float(0x7FFFFFFFu);
  return __uint_as_float(byte << 20) * 0x1p120f;  // exponent bias 127 against 7; subnormals scale alike
#else
  return 0;
#endif
}

/// Eight e2m1 codes, x[0] in the lowest nibble: nearest, ties to even, at most 6; NaN gives +6. A NaN must
/// have a clear sign bit, as those have that arithmetic instructions return.
DEVICE_FN uint32_t convert_e2m1x8(const float (&x)[8]) {
#if defined(SM120_EMULATED)
  uint32_t codes = 0;
  for (int i = 0; i < 8; ++i) codes |= emu::float_to_e2m1(x[i]) << (4 * i);
  return codes;
#elif defined(SM120_NATIVE)
  uint32_t codes;
  asm("{ .reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d}; }"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return codes;
#elif defined(SM120_DECODED)
  return decoded::convert_e2m1x8(x);
#else
  return 0;
#endif
}

/// The larger magnitude in each half of two registers of bf16 pairs, its sign undefined; NaN only where both
/// are.
DEVICE_FN uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
#if defined(SM120_EMULATED)
  float a_low, a_high, b_low, b_high;
  unpack_bf16x2(a, a_low, a_high);
  unpack_bf16x2(b, b_low, b_high);
  return pack_bf16x2(-std::fmax(std::fabs(a_low), std::fabs(b_low)),
                     -std::fmax(std::fabs(a_high), std::fabs(b_high)));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t larger;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  uint32_t larger;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
  return larger;
#endif
}

DEVICE_FN uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
#if defined(SM120_EMULATED)
  float a_low, a_high, b_low, b_high;
  unpack_f16x2(a, a_low, a_high);
  unpack_f16x2(b, b_low, b_high);
  return pack_f16x2(-std::fmax(std::fabs(a_low), std::fabs(b_low)),
                    -std::fmax(std::fabs(a_high), std::fabs(b_high)));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t larger;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  uint32_t larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
  return larger;
#endif
}

}  // namespace sm120::ptx
