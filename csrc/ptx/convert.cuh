// Conversions between float32 and the 16-bit output types, round to nearest even.
#pragma once

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

}  // namespace sm120::ptx
