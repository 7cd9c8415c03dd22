// Which kernel multiplies how: the only place that knows both. Plain C++.
#pragma once

#include <cstdint>

#include "../gemm_skinny/config.h"
#include "../gemm_tiled/config.h"

namespace sm120::gemm {

/// Up to here a row's result does not depend on what else is in the batch: one kernel, sums in an order that
/// N, K and the device decide.
constexpr int kSkinnyTokens = skinny::kMaxTokens;

/// What the choice depends on besides the problem.
struct Device {
  int sm_count;
  int max_cluster;  // 1 where clusters do not exist
};

struct Plan {
  bool tiled;
  skinny::Config skinny;  // unless tiled
  tiled::Shape shape;     // if tiled
};

/// Tiled from the first token count that gives every SM a tile. Before that the tiles leave SMs idle for the
/// whole of K, which only the other kernel splits over CTAs: 256 x 1024 x 7168 took 28 instead of 69 us on an
/// H200 (132 SMs, decoded path), 128 x 4096 x 4096, where they are about as many, the same.
constexpr bool is_tiled(int m, int n, const Device& device) {
  const int64_t tiles = static_cast<int64_t>(tiled::tiles_along(tiled::Shape::kSplitK, m)) *
                        tiled::tiles_along(tiled::Shape::kSplitK, n);
  return m > kSkinnyTokens && tiles >= device.sm_count;
}

constexpr Plan choose_plan(int m, int n, int k, const Device& device) {
  return {is_tiled(m, n, device), skinny::choose_config(m, n, k, device.sm_count, device.max_cluster),
          tiled::choose_shape(m, n, device.sm_count)};
}

/// Whether the skinny kernel had better quantize 16-bit activations itself, which has the same bits as the
/// quantizer in front of it and saves its launch, but does the work again for every row tile: units of K x
/// row tiles x tiles of tokens. Timed on an H200 (decoded path), up to 8 units an SM the two ways are within
/// 2 % of each other for long K, and from 13 on one launch loses 15 % and more. Natively the work has half as
/// many instructions, so there is a gain to expect below the limit on SM12x, and none was measured.
constexpr int kQuantizedUnitsPerSm = 8;

constexpr bool quantizes_inside(int m, int n, int k, const Device& device) {
  if (m > skinny::kMaxQuantizedTokens) return false;
  const int64_t units = static_cast<int64_t>(skinny::row_tiles(n)) * skinny::units_along_k(k) *
                        skinny::choose_config(m, n, k, device.sm_count, device.max_cluster).token_tiles;
  return units <= static_cast<int64_t>(kQuantizedUnitsPerSm) * device.sm_count;
}

}  // namespace sm120::gemm
