#include "mma_model.h"

#include <cmath>

#include "instructions.h"

namespace emu {

MmaElement mma_element(const uint32_t* registers, int stride, int select_a, int select_b, int lane,
                       int index) {
  const auto word = [&](int of_lane, int number) { return registers[of_lane * stride + number]; };
  const int row = lane / 4 + 8 * (index / 2);
  const int column = 2 * (lane % 4) + index % 2;
  MmaElement element = {0.0, 0.0, false};
  for (int k = 0; k < 64; ++k) {
    const int quad_lane = k % 32 / 8;
    const int a_register = row / 8 + 2 * (k / 32);
    const int b_register = 4 + k / 32;
    const uint32_t a_code = word(4 * (row % 8) + quad_lane, a_register) >> (4 * (k % 8));
    const uint32_t b_code = word(4 * column + quad_lane, b_register) >> (4 * (k % 8));
    const uint32_t a_scale = word(4 * (row % 8) + 2 * select_a + row / 8, 6) >> (8 * (k / 16));
    const uint32_t b_scale = word(4 * column + select_b, 7) >> (8 * (k / 16));
    if ((a_scale | b_scale) & 0x80u) element.illegal = true;
    const double product = e2m1_to_double(a_code & 15u) * ue4m3_to_double(a_scale & 255u) *
                           e2m1_to_double(b_code & 15u) * ue4m3_to_double(b_scale & 255u);
    element.sum += product;
    element.magnitude += std::fabs(product);
  }
  return element;
}

}  // namespace emu
