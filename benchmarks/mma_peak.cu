// The rate of mma.sync m16n8k16 (fp16 operands, float32 sums) from registers alone: what the decoded FP4
// multiply could reach at best on the card at hand. Called through ctypes by benchmarks/gemm_tiled.py.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kChains = 8;  // independent accumulators of a warp
constexpr int kWarps = 8;
constexpr int kTurns = 4096;

__global__ void __launch_bounds__(32 * kWarps) multiply(float* sink, uint32_t bits) {
  float d[kChains][4] = {};
  const uint32_t a = bits + threadIdx.x;
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, "
          "{%0, %1, %2, %3};\n"
          : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
          : "r"(a), "r"(bits));
    }
  }
  float sum = 0;
  for (int i = 0; i < kChains; ++i) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
  if (sum == 1.0f) *sink = sum;  // never: keeps the multiplies
}

}  // namespace

/// TFLOP/s, the best of `repeats` launches that fill every SM twice; negative if CUDA failed.
extern "C" double mma_peak(int repeats) {
  int device = 0;
  int sms = 0;
  cudaEvent_t start;
  cudaEvent_t end;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaEventCreate(&start) != cudaSuccess || cudaEventCreate(&end) != cudaSuccess) {
    return -1;
  }
  const double flops = 2.0 * sms * kWarps * kTurns * kChains * 2.0 * 16 * 8 * 16;
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    cudaEventRecord(start);
    multiply<<<2 * sms, 32 * kWarps>>>(nullptr, 0);
    cudaEventRecord(end);
    float milliseconds = 0;
    if (cudaEventSynchronize(end) != cudaSuccess ||
        cudaEventElapsedTime(&milliseconds, start, end) != cudaSuccess) {
      return -1;
    }
    const double rate = flops / milliseconds * 1e-9;
    if (rate > best) best = rate;
  }
  return best;
}
