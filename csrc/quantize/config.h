// Quantizing activations to NVFP4: what a launch is given, and which thread has which rows. Plain C++.
#pragma once

#include <cstdint>

namespace sm120::quantize {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlock = 16;

enum class InputType : int { kBfloat16 = 0, kFloat16 = 1 };
enum class Layout : int { kSwizzled = 0, kLinear = 1 };

/// How the block scale and the codes are rounded.
enum class Rule : int {
  kExact = 0,       // every intermediate exact, as sglang_sm120/reference.py; slow, for tests
  kReciprocal = 1,  // float32 with approximate reciprocals, the steps FlashInfer takes
};

/// x [m, k] -> codes [m, k/2] and scales, both for the encode scale *global_scale.
struct Params {
  const void* x;  // rows x_stride elements apart (multiple of 8), 16-byte aligned
  const float* global_scale;
  uint8_t* codes;   // contiguous, 8-byte aligned
  uint8_t* scales;  // every byte is written: [m, k/16], or the swizzle padded to 128 rows and 4 blocks
  int64_t x_stride;
  int m, k;
  Layout layout;
};

/// CTAs along K (grid x: 32 blocks each) and groups of kWarps row slots (grid y), see kernel.cuh.
struct Grid {
  int columns;
  int groups;
};

constexpr int kMaxGroups = 65535;  // the most that a grid may have along y
/// Whole tiles of 128 rows are worked off, at four rows a thread by 32 / kWarps groups each.
constexpr int kMaxRows = kMaxGroups / (32 / kWarps) * 128;

/// Rows that a thread takes, 32 apart: four once that still leaves several warps to every scheduler of a
/// large card; at few tokens one, so that they spread over as many SMs as there are.
constexpr int rows_per_thread(int m, int k) {
  return m >= (1 << 16) || int64_t{1} * m * k >= (1 << 22) ? 4 : 1;
}

constexpr Grid grid_for(int m, int k, int rows) {
  const int slots = rows == 4 ? (m + 127) / 128 * 32 : (m + 31) / 32 * 32;
  return {(k + 32 * kBlock - 1) / (32 * kBlock), slots / kWarps};
}
static_assert(grid_for(kMaxRows, kBlock, rows_per_thread(kMaxRows, kBlock)).groups <= kMaxGroups);

}  // namespace sm120::quantize
