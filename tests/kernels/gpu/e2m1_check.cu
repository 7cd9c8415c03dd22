// Holds the e2m1 conversion of the card at hand (an instruction on SM12x, two additions elsewhere) against
// comparisons with the midpoints, for all float32 values but NaN with a sign. Prints one line and returns 0
// if all agree.
#include <cstdio>

#include "ptx/convert.cuh"

namespace {

constexpr unsigned kCtas = 4096, kThreads = 256;
constexpr uint64_t kEveryEighth = uint64_t{1} << 29;  // a thread converts eight neighbours at a time

__device__ uint32_t by_comparison(float x) {
  if (!(x == x)) return 7;
  const float m = fabsf(x);
  const uint32_t code =
      (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  return code | (__float_as_uint(x) >> 28 & 8u);
}

__global__ void compare(unsigned long long* differences, uint32_t* example) {
  unsigned long long found = 0;
  for (uint64_t i = blockIdx.x * uint64_t{kThreads} + threadIdx.x; i < kEveryEighth; i += kCtas * kThreads) {
    float x[8];
    uint32_t wanted = 0;
    for (int j = 0; j < 8; ++j) {
      x[j] = __uint_as_float(static_cast<uint32_t>(8 * i + j));
      if (!(x[j] == x[j])) x[j] = __uint_as_float(0x7FFFFFFFu);
      wanted |= by_comparison(x[j]) << (4 * j);
    }
    if (sm120::ptx::convert_e2m1x8(x) != wanted) {
      ++found;
      *example = static_cast<uint32_t>(8 * i);
    }
  }
  if (found > 0) atomicAdd(differences, found);
}

}  // namespace

int main() {
  unsigned long long* differences;
  uint32_t* example;
  if (cudaMallocManaged(&differences, sizeof(*differences)) != cudaSuccess) return 2;
  if (cudaMallocManaged(&example, sizeof(*example)) != cudaSuccess) return 2;
  *differences = 0;
  compare<<<kCtas, kThreads>>>(differences, example);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    std::printf("CUDA: %s\n", cudaGetErrorString(error));
    return 2;
  }
  std::printf("%llu groups of eight differ, one begins at %08x\n", *differences,
              *differences ? *example : 0u);
  return *differences == 0 ? 0 : 1;
}
