// Holds the e2m1 rounding of cards without the conversion against the definition, for all float32 values that
// an instruction can return (a NaN is quiet and has no sign). Prints the first difference and returns 1, or
// returns 0.
//
// The definition (nearest value of a table) never decreases with the magnitude. So where the rounding gives
// the same code for a run of neighbouring magnitudes, checking the first and the last of them is enough.
#include <bit>
#include <cstdio>

#include "emulation/instructions.h"
#include "ptx/convert.cuh"

namespace {

using sm120::ptx::decoded::e2m1_magnitude;
using sm120::ptx::decoded::kCodeZero;

constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kQuietNan = 0x7FC00000u;

uint32_t rounded(uint32_t bits) {
  return e2m1_magnitude(std::bit_cast<float>(bits)) - kCodeZero;
}

bool agrees(uint32_t bits) {
  const uint32_t wanted = emu::float_to_e2m1(std::bit_cast<float>(bits));
  if (rounded(bits) == wanted) return true;
  std::printf("bits %08x: code %x, wanted %x\n", bits, rounded(bits), wanted);
  return false;
}

bool every_magnitude() {
  uint32_t code = rounded(0);
  if (!agrees(0)) return false;
  int changes = 0;
  for (uint32_t bits = 1; bits <= kInfinity; ++bits) {
    if (rounded(bits) == code) continue;
    if (++changes > 7 || !agrees(bits - 1) || !agrees(bits)) return false;
    code = rounded(bits);
  }
  for (uint32_t bits = kQuietNan; bits <= 0x7FFFFFFFu; ++bits) {
    if (rounded(bits) != code) return agrees(bits);
  }
  return agrees(kInfinity) && agrees(kQuietNan);
}

/// Signs, and the place of each of the eight codes: one value among seven others that differ from it.
bool every_place() {
  const float others[8] = {0.5f, -1.0f, 1.5f, -2.0f, 3.0f, -4.0f, 6.0f, -0.0f};
  for (uint32_t top = 0; top < 0x10000u; ++top) {
    const float value = std::bit_cast<float>(top << 16 | 1u);
    if (value != value && (top << 16) < kQuietNan) continue;
    if (value != value && top >= 0x8000u) continue;
    for (int place = 0; place < 8; ++place) {
      float x[8];
      uint32_t wanted = 0;
      for (int i = 0; i < 8; ++i) {
        x[i] = i == place ? value : others[i];
        wanted |= emu::float_to_e2m1(x[i]) << (4 * i);
      }
      const uint32_t codes = sm120::ptx::decoded::convert_e2m1x8(x);
      if (codes != wanted) {
        std::printf("%a at place %d: codes %08x, wanted %08x\n", static_cast<double>(value), place, codes,
                    wanted);
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  return every_place() && every_magnitude() ? 0 : 1;
}
