// Shape of the tiled kernel: what is fixed, what a launch chooses, and the choice itself. Plain C++.
#pragma once

#include <cstdint>

#include "../gemm/params.h"

namespace sm120::tiled {

using gemm::OutputType;
using gemm::Params;

constexpr int kStripRows = 64;  // rows of an operand that a warp multiplies at a time (strip.cuh)
constexpr int kUnitK = 128;     // K of one ring stage: two mma steps, 64 bytes of each row
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRingStages = 2;

constexpr int kUnitRowBytes = kUnitK / 2;
constexpr int kStripCodeBytes = kStripRows * kUnitRowBytes;
constexpr int kStripBytes = kStripCodeBytes + kStripRows * kUnitK / 16;

/// How the four warps of a CTA divide the work. Every warp owns 64 x 64 sums: no operand fragment is used
/// less than four times once it is in registers.
enum class Shape : int {
  kWide = 128,   // 128 tokens x 128 columns, two warps along each; all of them share the ring
  kSplitK = 64,  // 64 x 64, K dealt out unit by unit to the warps, each with a ring of its own
};

/// Strips along one side of a CTA.
constexpr int strips(Shape shape) {
  return static_cast<int>(shape) / kStripRows;
}
/// Groups of warps that walk along K apart from each other.
constexpr int slices(Shape shape) {
  return kWarps / (strips(shape) * strips(shape));
}
constexpr int stage_bytes(Shape shape) {
  return 2 * strips(shape) * kStripBytes;
}
constexpr int ring_bytes(Shape shape) {
  return kRingStages * stage_bytes(shape);
}

/// Dynamic shared memory. Two wide CTAs fit in the 100 KB of an SM12x SM.
constexpr int shared_bytes(Shape shape) {
  return slices(shape) * ring_bytes(shape);
}

constexpr int units_along_k(int k) {
  return (k + kUnitK - 1) / kUnitK;
}

/// CTA tiles along `rows` rows. Operands come in blocks of 128 rows, the unit of the scale layout, so the
/// last tile of the small shape may hold none of them.
constexpr int tiles_along(Shape shape, int rows) {
  return (rows + 127) / 128 * (2 / strips(shape));
}

/// Tiles of tokens are dealt out in equal bands of at most 16, worked off one after another, and inside a
/// band along the columns: CTAs that run at the same time share both operands in L2.
struct Grid {
  int width;   // tiles of tokens in a band; the last band may have CTAs without any
  int rows;    // tiles of columns
  int planes;  // bands
};

constexpr Grid grid(Shape shape, int m, int n) {
  constexpr int kBand = 16;
  const int tiles_m = tiles_along(shape, m);
  const int bands = (tiles_m + kBand - 1) / kBand;
  return {(tiles_m + bands - 1) / bands, tiles_along(shape, n), bands};
}

/// Wide tiles read an operand half as often, so they are the choice once there is one for every SM; four
/// times as many small ones keep more SMs at work before that.
constexpr Shape choose_shape(int m, int n, int sm_count) {
  const int64_t wide = static_cast<int64_t>(tiles_along(Shape::kWide, m)) * tiles_along(Shape::kWide, n);
  return wide >= sm_count ? Shape::kWide : Shape::kSplitK;
}

}  // namespace sm120::tiled
