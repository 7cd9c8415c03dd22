// Quantizing activations to NVFP4: what a launch is given. Plain C++.
#pragma once

#include <cstdint>

namespace sm120::quantize {

constexpr int kThreads = 256;
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
  InputType input_type;
  Layout layout;
  Rule rule;
};

/// Threads of work: one per block of a real row (padded blocks included), one per word of a padding row.
constexpr int64_t work_items(int m, int k, Layout layout) {
  const int64_t tiles = (k + 63) / 64;
  const int64_t padding_rows = (m + 127) / 128 * 128 - m;
  return layout == Layout::kLinear ? int64_t{1} * m * (k / kBlock) : m * tiles * 4 + padding_rows * tiles;
}

}  // namespace sm120::quantize
