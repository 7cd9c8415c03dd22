// The FP4 multiply as the PTX ISA tables define it, over the registers of a whole warp. Used by the emulation
// and, on a GPU, by the test that holds the decoded and the native instruction against it.
#pragma once

#include <cstdint>

namespace emu {

/// Registers of one lane: a0..a3, b0, b1, scale a, scale b.
constexpr int kMmaWords = 8;

struct MmaElement {
  double sum;        // of the 64 scaled products that lane `lane` adds to its accumulator d[index]
  double magnitude;  // of their absolute values
  bool illegal;      // a scale byte with its top bit set was read
};

/// `registers` is [32][stride] words; `stride` is at least kMmaWords.
MmaElement mma_element(const uint32_t* registers, int stride, int select_a, int select_b, int lane,
                       int index);

}  // namespace emu
