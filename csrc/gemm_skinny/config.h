// Shape of the skinny kernel: what is fixed, what a launch chooses, and the choice itself. Plain C++.
#pragma once

#include <cstdint>

#include "../gemm/params.h"

namespace sm120::skinny {

constexpr int kTileRows =
    32;  // weight rows of a CTA: rows p, p+32, p+64, p+96 for 8 consecutive p (row_tile.cuh)
constexpr int kUnitK = 128;  // K of one stage of one warp: two mma steps, 64 bytes of each weight row
constexpr int kWarps = 8;    // K is dealt out unit by unit to the warps of a CTA
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxTokens = 64;
// Units in flight per warp. Two keep a CTA under 50 KB, so that two fit in the 100 KB of an SM12x SM: two of
// one kernel, or the first loads of the next kernel beside the tail of this one.
constexpr int kRingStages = 2;
constexpr int kMaxCluster = 8;  // the portable limit

constexpr int kUnitRowBytes = kUnitK / 2;
constexpr int kUnitWeightBytes = kTileRows * kUnitRowBytes;
constexpr int kUnitScaleBytes = kTileRows * kUnitK / 16;
constexpr int kUnitBytes = kUnitWeightBytes + kUnitScaleBytes;

using gemm::OutputType;

struct Params : gemm::Params {
  int cluster_shift;  // log2 of the CTAs in a cluster
};

/// The same for activations that the kernel quantizes itself: `activations` are rows of 16-bit numbers,
/// activation_stride (a multiple of 16) bytes apart, and there are no activation_scales.
struct QuantizingParams : Params {
  const float* encode_scale;
};
constexpr int kMaxQuantizedTokens = 16;

/// What a launch chooses. Only `cluster` changes the order of the sums, and it never depends on m.
struct Config {
  int cluster;      // CTAs that share a row tile, each with a contiguous slice of K: 1, 2, 4 or 8
  int token_tiles;  // 8-column tiles of tokens: 1, 2, 4 or 8
};

constexpr int units_along_k(int k) {
  return (k + kUnitK - 1) / kUnitK;
}
constexpr int row_tiles(int n) {
  return (n + 127) / 128 * (128 / kTileRows);
}

/// Rows of the grid: tokens are worked off in blocks of kMaxTokens, each reading the weights again (from L2
/// mostly).
constexpr int token_blocks(int m) {
  return (m + kMaxTokens - 1) / kMaxTokens;
}

/// Dynamic shared memory: the rings of all warps, the partial sums that cluster peers push, the mbarrier for
/// those.
constexpr int shared_bytes(int stages, int token_tiles) {
  return kWarps * stages * kUnitBytes + kTileRows * 8 * token_tiles * static_cast<int>(sizeof(float)) + 8;
}

/// CTAs that share a row tile. Up to 64 tokens, one block of them, a function of (n, k, device) only: a row's
/// result must not depend on what else is in the batch. Measured on an H200 (docs/kernels.md): grids of one
/// CTA an SM leave the second place of every SM to the next kernel of a dependent chain and are best for
/// short slices; where every warp keeps at least two units, filling both places with CTAs of this kernel is
/// better. A CTA of 64 tokens has an SM to itself, so more blocks than one share out the SMs: 256 x 1024 x
/// 7168 took 28 us without clusters, 51 with four.
constexpr int choose_cluster(int n, int k, int blocks, int sm_count, int max_cluster) {
  const int64_t tiles = static_cast<int64_t>(row_tiles(n)) * blocks;
  const int units = units_along_k(k);
  int cluster = 1;
  while (2 * cluster <= max_cluster) {
    const int doubled = 2 * cluster;
    const bool one_per_sm = tiles * doubled <= sm_count && units >= doubled * (kWarps / 2);
    const bool two_per_sm =
        blocks <= 1 && 2 * tiles * doubled <= 5 * sm_count && units >= doubled * kWarps * 2;
    if (!one_per_sm && !two_per_sm) break;
    cluster = doubled;
  }
  return cluster;
}

constexpr Config choose_config(int m, int n, int k, int sm_count, int max_cluster) {
  const int token_tiles = m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : 8;
  return {choose_cluster(n, k, token_blocks(m), sm_count, max_cluster), token_tiles};
}

}  // namespace sm120::skinny
