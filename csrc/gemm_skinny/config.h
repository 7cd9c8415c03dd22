// Shape of the skinny kernel: what is fixed, what a launch chooses, and the choice itself. Plain C++.
#pragma once

#include <cstdint>

namespace sm120::skinny {

constexpr int kTileRows =
    32;  // weight rows of a CTA: rows p, p+32, p+64, p+96 for 8 consecutive p (row_tile.cuh)
constexpr int kUnitK = 128;  // K of one stage of one warp: two mma steps, 64 bytes of each weight row
constexpr int kWarps = 8;    // K is dealt out unit by unit to the warps of a CTA
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxTokens = 64;
constexpr int kBlock = 16;      // elements of K that share a scale
constexpr int kMaxCluster = 8;  // the portable limit

constexpr int kUnitRowBytes = kUnitK / 2;
constexpr int kUnitWeightBytes = kTileRows * kUnitRowBytes;
constexpr int kUnitScaleBytes = kTileRows * kUnitK / 16;
constexpr int kUnitBytes = kUnitWeightBytes + kUnitScaleBytes;

enum class OutputType : int { kBfloat16 = 0, kFloat16 = 1 };

/// D[m, n] = alpha[n] * sum_k X[m, k] * W[n, k] + bias[n]. Strides in bytes except out_stride (elements).
struct Params {
  const uint8_t* activations;        // [m, k/2] packed e2m1, rows activation_stride apart (multiple of 4)
  const uint8_t* activation_scales;  // swizzled 128x4
  const uint8_t* weights;            // [n, k/2] packed e2m1, rows weight_stride apart (multiple of 16)
  const uint8_t* weight_scales;      // swizzled 128x4, 16-byte aligned
  const float* alpha;                // one, or one per output column
  const void* bias;                  // n elements of the output type, or null
  void* out;                         // [m, n], rows out_stride apart (even)
  int64_t activation_stride;
  int64_t weight_stride;
  int64_t out_stride;
  int m, n, k;
  bool alpha_per_column;
  OutputType output_type;
};

/// What a launch chooses. Only `cluster` changes the order of the sums, and it never depends on m.
struct Config {
  int cluster;      // CTAs that share a row tile, each with a contiguous slice of K: 1, 2, 4 or 8
  int stages;       // units in flight per warp: 2 or 4
  int token_tiles;  // 8-column tiles of tokens: 1, 2, 4 or 8
};

constexpr int units_along_k(int k) {
  return (k + kUnitK - 1) / kUnitK;
}
constexpr int row_tiles(int n) {
  return (n + 127) / 128 * (128 / kTileRows);
}

/// Dynamic shared memory: the rings of all warps, then the partial sums that cluster peers push.
constexpr int shared_bytes(int stages, int token_tiles) {
  return kWarps * stages * kUnitBytes + kTileRows * 8 * token_tiles * static_cast<int>(sizeof(float));
}

/// Smallest cluster that gives every SM a CTA, as long as each warp keeps a unit of K. A function of (n, k,
/// device) only: a row's result must not depend on what else is in the batch.
constexpr int choose_cluster(int n, int k, int sm_count, int max_cluster) {
  int cluster = 1;
  while (2 * cluster <= max_cluster && row_tiles(n) * cluster < sm_count &&
         units_along_k(k) >= 2 * cluster * (kWarps / 2)) {
    cluster *= 2;
  }
  return cluster;
}

constexpr Config choose_config(int m, int n, int k, int sm_count, int max_cluster) {
  const int cluster = choose_cluster(n, k, sm_count, max_cluster);
  // Four stages when all CTAs fit at once with one an SM; else two, so that two CTAs share the 100 KB of an
  // SM and one computes its tail while the other loads.
  const int stages = row_tiles(n) * cluster <= sm_count ? 4 : 2;
  const int token_tiles = m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : 8;
  return {cluster, stages, token_tiles};
}

}  // namespace sm120::skinny
