// The weight stream: each warp keeps `stages` units of its own in flight with cp.async and waits for nobody
// else. These are the only cp.async of the kernel, and the only memory accesses in front of the dependency
// wait.
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
SHARED_FN UnitRange units_of_warp(int k, int rank, int cluster, int warp) {
  const int units = units_along_k(k);
  const int begin = rank * units / cluster;
  const int end = (rank + 1) * units / cluster;
  const int mine = end - begin - warp;
  return {begin + warp, mine > 0 ? (mine + kWarps - 1) / kWarps : 0};
}

class WeightStream {
 public:
  DEVICE_FN WeightStream(const Params& params, int tile, int lane)
      : policy_(ptx::policy_evict_first()),
        weights_(params.weights),
        quarter_stride_(kScaleQuarterRows * params.weight_stride),
        row_bytes_(params.k / 2),
        chunk_(lane % 4),
        k_tiles_(scale_tiles_along_k(params.k)),
        scale_step_(lane / 8) {
    const int p = lane / 4;
    const int row = first_row(tile) + p;
    rows_left_ = params.n - row;
    lane_weights_ = params.weights + row * params.weight_stride + chunk_ * 16;
    lane_scales_ = params.weight_scales + scale_tile_offset(first_row(tile) / kScaleTileRows, 0, k_tiles_) +
                   (first_row(tile) % kScaleQuarterRows + lane % 8) * 16;
    weight_slot_ = weight_offset(p, chunk_);
    scale_slot_ = kUnitWeightBytes + lane * 16;
  }

  /// Start the copies of one unit into `stage`; rows past n and k past the end become zeros.
  DEVICE_FN void load(uint32_t stage, int unit) const {
    const int left = row_bytes_ - unit * kUnitRowBytes - chunk_ * 16;  // a multiple of 8: k is one of 16
    const int bytes = left < 0 ? 0 : left > 16 ? 16 : left;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int wanted = q * kScaleQuarterRows < rows_left_ ? bytes : 0;
      const uint8_t* source =
          lane_weights_ + q * quarter_stride_ + static_cast<int64_t>(unit) * kUnitRowBytes;
      ptx::cp_async_16(stage + weight_slot_ + q * 8 * kUnitRowBytes, wanted > 0 ? source : weights_, wanted,
                       policy_);
    }
    if (scale_step_ < 2) {
      const int k_tile = 2 * unit + scale_step_;
      const bool exists = k_tile < k_tiles_;
      ptx::cp_async_16(stage + scale_slot_,
                       lane_scales_ + (exists ? static_cast<int64_t>(k_tile) * kScaleTileBytes : 0),
                       exists ? 16 : 0, policy_);
    }
  }

 private:
  uint64_t policy_;
  const uint8_t* weights_;
  const uint8_t* lane_weights_;
  const uint8_t* lane_scales_;
  int64_t quarter_stride_;
  int row_bytes_, chunk_, rows_left_, k_tiles_, scale_step_;
  uint32_t weight_slot_, scale_slot_;
};

}  // namespace sm120::skinny
