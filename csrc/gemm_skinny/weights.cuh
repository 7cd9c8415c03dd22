// The weight stream: each warp keeps `stages` units of its own in flight with cp.async and waits for nobody
// else. These are the only cp.async of the kernel, and the only memory accesses in front of the dependency
// wait.
//
// The first copies should leave as early as possible, so nothing is computed per copy: a warp's units are a
// constant distance apart (kWarps units), which turns the addresses of the first stages into immediate
// offsets.
#pragma once

#include "../ptx/cp_async.cuh"
#include "row_tile.cuh"

namespace sm120::skinny {

/// The units of K that one warp works through: first, first + kWarps, ... below the end of its CTA's slice.
struct UnitRange {
  int first;
  int count;
};

/// Slices are contiguous along K and differ by at most one unit; inside a slice the warps take turns, so that
/// a CTA's loads walk along each row.
SHARED_FN UnitRange units_of_warp(int k, int rank, int cluster_shift, int warp) {
  const int units = units_along_k(k);
  const int begin = (rank * units) >> cluster_shift;
  const int end = ((rank + 1) * units) >> cluster_shift;
  const int mine = end - begin - warp;
  return {begin + warp, mine > 0 ? (mine + kWarps - 1) / kWarps : 0};
}

class WeightStream {
 public:
  static constexpr int kRowStep = kWarps * kUnitRowBytes;  // bytes from a unit to the warp's next one
  static constexpr int kScaleTileStep = kWarps * kUnitK / kScaleTileK;

  /// Stands at unit `first` of tile `tile`.
  DEVICE_FN WeightStream(const Params& params, int tile, int first, int lane)
      : policy_(ptx::policy_evict_first()), copies_scales_(lane < 16) {
    const int chunk = lane % 4;
    const int p = lane / 4;
    const int byte = first * kUnitRowBytes + chunk * 16;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      // Rows past n stand in for the last one: their results are never stored.
      const int row = first_row(tile) + q * kScaleQuarterRows + p;
      rows_[q] = params.weights +
                 static_cast<int64_t>(row < params.n ? row : params.n - 1) * params.weight_stride + byte;
    }
    bytes_left_ = params.k / 2 - byte;
    const int k_tiles = scale_tiles_along_k(params.k);
    const int k_tile = 2 * first + lane / 8;
    tiles_left_ = k_tiles - k_tile;
    scales_ = params.weight_scales + scale_tile_offset(first_row(tile) / kScaleTileRows, k_tile, k_tiles) +
              (first_row(tile) % kScaleQuarterRows + lane % 8) * 16;
    weight_slot_ = weight_offset(p, chunk);
    scale_slot_ = kUnitWeightBytes + lane * 16;
  }

  /// Start the copies of the unit kAhead turns further into `stage`; bytes past the end of K become zeros.
  template <int kAhead>
  DEVICE_FN void load(uint32_t stage) const {
    const int left = bytes_left_ - kAhead * kRowStep;  // a multiple of 8: k is one of 16
    const int bytes = left < 0 ? 0 : left > 16 ? 16 : left;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      ptx::cp_async_16(stage + weight_slot_ + q * 8 * kUnitRowBytes, rows_[q] + kAhead * kRowStep, bytes,
                       policy_);
    }
    if (copies_scales_) {
      const int scale_bytes = tiles_left_ > kAhead * kScaleTileStep ? 16 : 0;
      ptx::cp_async_16(stage + scale_slot_, scales_ + kAhead * kScaleTileStep * kScaleTileBytes, scale_bytes,
                       policy_);
    }
  }

  /// Go on to the warp's next unit.
  DEVICE_FN void advance() {
#pragma unroll
    for (int q = 0; q < 4; ++q) rows_[q] += kRowStep;
    bytes_left_ -= kRowStep;
    scales_ += kScaleTileStep * kScaleTileBytes;
    tiles_left_ -= kScaleTileStep;
  }

 private:
  uint64_t policy_;
  const uint8_t* rows_[4];
  const uint8_t* scales_;
  int bytes_left_, tiles_left_;
  uint32_t weight_slot_, scale_slot_;
  bool copies_scales_;
};

}  // namespace sm120::skinny
