// Holds mma_nvfp4 on the card at hand (native or decoded) against the model of the PTX tables: every
// selector, random registers, poison in the lanes the instruction ignores, NaN scales, zero and largest
// values. Prints one line and returns 0 if all agree. Built and run by test_gpu_checks.py.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "emulation/instructions.h"
#include "emulation/mma_model.h"
#include "ptx/mma_nvfp4.cuh"

namespace {

constexpr int kCases = 512;
constexpr int kLanes = 32;

template <int kSelectA, int kSelectB>
__global__ void multiply(const uint32_t* registers, float* d) {
  const uint32_t* mine = registers + (blockIdx.x * kLanes + threadIdx.x) * emu::kMmaWords;
  float* out = d + (blockIdx.x * kLanes + threadIdx.x) * 4;
  const sm120::ptx::FragmentA a = {{mine[0], mine[1], mine[2], mine[3]}};
  const sm120::ptx::FragmentB b = {{mine[4], mine[5]}};
  sm120::ptx::FragmentD sum = {{out[0], out[1], out[2], out[3]}};
  sm120::ptx::mma_nvfp4<kSelectA, kSelectB>(sum, a, b, mine[6], mine[7]);
  for (int i = 0; i < 4; ++i) out[i] = sum.reg[i];
}

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(2);
}

// Case kinds: 0 integers (all scales 1 or 2: exact), 1 any legal scale, 2 some NaN scales, 3 extremes.
uint32_t draw_scales(std::mt19937& random, int kind) {
  uint32_t word = 0;
  for (int j = 0; j < 4; ++j) {
    uint32_t byte = random() % 0x7F;
    if (kind == 0) byte = 0x38 + 8 * (random() % 2);
    if (kind == 2 && random() % 16 == 0) byte = 0x7F;
    if (kind == 3) byte = random() % 2 ? 0x7E : random() % 4;
    word |= byte << (8 * j);
  }
  return word;
}

template <int kSelectA, int kSelectB>
int check(std::mt19937& random) {
  std::vector<uint32_t> registers(kCases * kLanes * emu::kMmaWords);
  std::vector<float> before(kCases * kLanes * 4);
  for (int c = 0; c < kCases; ++c) {
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t* mine = &registers[(c * kLanes + lane) * emu::kMmaWords];
      for (int r = 0; r < 6; ++r) mine[r] = random();
      // Lanes outside the selection hold NaN scales: reading one shows.
      mine[6] = lane % 4 / 2 == kSelectA ? draw_scales(random, c % 4) : 0x7F7F7F7Fu;
      mine[7] = lane % 4 == kSelectB ? draw_scales(random, c % 4) : 0x7F7F7F7Fu;
      for (int i = 0; i < 4; ++i) {
        before[(c * kLanes + lane) * 4 + i] = static_cast<float>(static_cast<int>(random() % 65) - 32);
      }
    }
  }
  uint32_t* device_registers;
  float* device_d;
  require(cudaMalloc(&device_registers, registers.size() * 4));
  require(cudaMalloc(&device_d, before.size() * 4));
  require(cudaMemcpy(device_registers, registers.data(), registers.size() * 4, cudaMemcpyHostToDevice));
  require(cudaMemcpy(device_d, before.data(), before.size() * 4, cudaMemcpyHostToDevice));
  multiply<kSelectA, kSelectB><<<kCases, kLanes>>>(device_registers, device_d);
  require(cudaGetLastError());
  std::vector<float> after(before.size());
  require(cudaMemcpy(after.data(), device_d, after.size() * 4, cudaMemcpyDeviceToHost));
  int wrong = 0;
  for (int c = 0; c < kCases; ++c) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const auto element = emu::mma_element(&registers[c * kLanes * emu::kMmaWords], emu::kMmaWords,
                                              kSelectA, kSelectB, lane, i);
        const size_t at = (c * kLanes + lane) * 4 + i;
        const double want = before[at] + element.sum;
        const double bound = c % 4 == 0 ? 0.0 : (element.magnitude + std::fabs(before[at])) * 0x1p-20;
        const bool right = std::isnan(want) ? std::isnan(after[at]) : std::fabs(after[at] - want) <= bound;
        if (!right && wrong++ == 0) {
          std::printf("select %d,%d case %d lane %d d%d: got %.9g, want %.9g\n", kSelectA, kSelectB, c, lane,
                      i, static_cast<double>(after[at]), want);
        }
      }
    }
  }
  require(cudaFree(device_registers));
  require(cudaFree(device_d));
  return wrong;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  const int wrong = check<0, 0>(random) + check<0, 1>(random) + check<0, 2>(random) + check<0, 3>(random) +
                    check<1, 0>(random) + check<1, 1>(random) + check<1, 2>(random) + check<1, 3>(random);
  std::printf("mma_nvfp4: 8 selector pairs, %d warps each, %d wrong elements\n", kCases, wrong);
  return wrong == 0 ? 0 : 1;
}
