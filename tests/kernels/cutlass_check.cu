// Our register tables against CUTLASS's: fill the registers of a warp from logical matrices by the layouts of
// CUTLASS's MMA traits, run our model of the instruction, read D by CUTLASS's layout, compare with the
// logical product. Host code only; exit status 0 if every element of every trial is exact.
#include <cmath>
#include <cstdio>
#include <cute/atom/mma_traits_sm120.hpp>
#include <random>

#include "emulation/instructions.h"
#include "emulation/mma_model.h"

using Traits = cute::MMA_Traits<cute::SM120::BLOCKSCALED::SM120_16x8x64_TN_VS<
    cutlass::float_e2m1_t, cutlass::float_e2m1_t, float, cutlass::float_ue4m3_t, 16>>;

namespace {

constexpr int kM = 16, kN = 8, kK = 64, kLanes = 32;

struct Matrices {
  uint32_t a[kM][kK], b[kN][kK], scale_a[kM][kK / 16], scale_b[kN][kK / 16];
};

Matrices draw(std::mt19937& random) {
  Matrices m;
  for (auto& row : m.a) {
    for (auto& code : row) code = random() % 16;
  }
  for (auto& row : m.b) {
    for (auto& code : row) code = random() % 16;
  }
  for (auto& row : m.scale_a) {
    for (auto& byte : row) byte = 0x30 + random() % 16;
  }
  for (auto& row : m.scale_b) {
    for (auto& byte : row) byte = 0x30 + random() % 16;
  }
  return m;
}

void put(uint32_t& word, int shift, uint32_t value) {
  word |= value << shift;
}

void fill(uint32_t (&registers)[kLanes][emu::kMmaWords], const Matrices& m) {
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t* mine = registers[lane];
    for (int v = 0; v < 32; ++v) {
      const int at = Traits::ALayout{}(lane, v);  // row + 16 * k
      put(mine[v / 8], 4 * (v % 8), m.a[at % kM][at / kM]);
    }
    for (int v = 0; v < 16; ++v) {
      const int at = Traits::BLayout{}(lane, v);  // column + 8 * k
      put(mine[4 + v / 8], 4 * (v % 8), m.b[at % kN][at / kN]);
    }
    for (int block = 0; block < kK / 16; ++block) {
      const int a_at = Traits::SFALayout{}(lane, 16 * block);
      const int b_at = Traits::SFBLayout{}(lane, 16 * block);
      put(mine[6], 8 * block, m.scale_a[a_at % kM][a_at / kM / 16]);
      put(mine[7], 8 * block, m.scale_b[b_at % kN][b_at / kN / 16]);
    }
  }
}

double product(const Matrices& m, int row, int column) {
  double sum = 0;
  for (int k = 0; k < kK; ++k) {
    sum += emu::e2m1_to_double(m.a[row][k]) * emu::ue4m3_to_double(m.scale_a[row][k / 16]) *
           emu::e2m1_to_double(m.b[column][k]) * emu::ue4m3_to_double(m.scale_b[column][k / 16]);
  }
  return sum;
}

}  // namespace

int main() {
  std::mt19937 random(3);
  int wrong = 0;
  for (int trial = 0; trial < 50; ++trial) {
    const Matrices m = draw(random);
    uint32_t registers[kLanes][emu::kMmaWords] = {};
    fill(registers, m);
    for (int select = 0; select < 8; ++select) {  // CUTLASS gives every lane of a pair or quad the same scale
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const int at = Traits::CLayout{}(lane, i);  // row + 16 * column
          const double got =
              emu::mma_element(registers[0], emu::kMmaWords, select % 2, select / 2, lane, i).sum;
          wrong += got != product(m, at % kM, at / kM);
        }
      }
    }
  }
  std::printf("register tables against CUTLASS: %d wrong elements\n", wrong);
  return wrong == 0 ? 0 : 1;
}
