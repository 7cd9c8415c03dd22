// Rounding float32 to e2m1 on cards without the conversion: two additions instead of seven comparisons.
//
// The codes 0..7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6: steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6. An
// addition rounds to whatever steps float32 has at the sum. Below 2^23 these are 0.5 and from there on 1, so
// for 0 <= x <= 6
//
//   x + (2^23 - 2)      is rounded as e2m1 is up to 4: the steps double at x = 2
//   x / 2 + 2^23        is rounded as e2m1 is from 4 on: a step of 1 is a step of 2 of x
//
// and the smaller of the two is the right one: the first below 4, the second above. Counted in the last place
// of float32 it is the code, plus that of 2^23 - 2, which is even, so that ties go to the even code.
//
// Compiles for the CPU too, where a test walks through all values of x.
#pragma once

#include "target.cuh"

#if defined(SM120_EMULATED)
#include <bit>
#include <cmath>
#endif

namespace sm120::ptx::decoded {

constexpr uint32_t kCodeZero = 0x4AFFFFFCu;  // 2^23 - 2

/// kCodeZero plus the three magnitude bits of the code of x.
DEVICE_FN uint32_t e2m1_magnitude(float x) {
  const float magnitude = fminf(fabsf(x), 6.0f);  // NaN becomes 6, too
  const float rounded = fminf(magnitude + (0x1p23f - 2.0f), magnitude * 0.5f + 0x1p23f);
#if defined(SM120_EMULATED)
  return std::bit_cast<uint32_t>(rounded);
#elif defined(__CUDA_ARCH__)
  return __float_as_uint(rounded);
#else
  return 0;
#endif
}

/// `nibbles` one nibble up, and the top four bits of x below: the sign and three that do not matter.
DEVICE_FN uint32_t shift_in_sign(uint32_t nibbles, float x) {
#if defined(SM120_EMULATED)
  return nibbles << 4 | std::bit_cast<uint32_t>(x) >> 28;
#elif defined(__CUDA_ARCH__)
  return __funnelshift_l(__float_as_uint(x), nibbles, 4);
#else
  return 0;
#endif
}

/// As ptx::convert_e2m1x8.
DEVICE_FN uint32_t convert_e2m1x8(const float (&x)[8]) {
  uint32_t codes = 0;
  uint32_t signs = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    codes = codes * 16u + e2m1_magnitude(x[i]);
    signs = shift_in_sign(signs, x[i]);
  }
  // Every summand carries kCodeZero along; times 16^i, modulo 2^32, they add up to a constant.
  return (codes - kCodeZero * 0x11111111u) | (signs & 0x88888888u);
}

}  // namespace sm120::ptx::decoded
