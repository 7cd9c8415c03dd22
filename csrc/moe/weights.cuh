// An expert's weights on their way to shared memory: units of 32 rows x 128 k in the layout of
// gemm_skinny/row_tile.cuh, each copied by the warp that multiplies it. Only which rows are local rows 0..31
// differs between the kernels:
//
//              local rows 0..7, 8..15, 16..23, 24..31
//   gate/up    gate rows i .. i+15, up rows i .. i+15 (no gate: rows i .. i+31)
//   down       rows p .. p+7 of each quarter of a 128-row block
//
// The blocks of 16 that gate/up has to quantize are neighbouring rows, whose scales the swizzle keeps 16
// bytes apart: they are copied word by word, and three quarters of the sectors that L2 reads for them belong
// to the CTAs next door.
//
// Rows of k / 2 bytes start at multiples of 16 bytes, or only of 8 if k is an odd multiple of 16 (kAligned
// false).
#pragma once

#include "../gemm_skinny/row_tile.cuh"
#include "../ptx/cp_async.cuh"
#include "config.h"

namespace sm120::moe {

/// The codes of 32 rows; rows[q] is the global row of local row 8 q + p for this lane's p = lane / 4.
template <bool kAligned>
class CodeRows {
 public:
  DEVICE_FN CodeRows(const uint8_t* weights, int k, const int (&rows)[4], int lane)
      : policy_(ptx::policy_evict_first()), half_k_(k / 2), byte_(lane % 4 * 16) {
    slot_ = skinny::weight_offset(lane / 4, lane % 4);
#pragma unroll
    for (int q = 0; q < 4; ++q) rows_[q] = weights + static_cast<int64_t>(rows[q]) * half_k_ + byte_;
  }

  /// Start the copies of a unit; bytes past the end of K become zeros.
  DEVICE_FN void load(uint32_t stage, int unit) const {
    const int offset = unit * skinny::kUnitRowBytes;
    const int left = half_k_ - byte_ - offset;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t slot = stage + slot_ + q * 8 * skinny::kUnitRowBytes;
      if constexpr (kAligned) {
        ptx::cp_async_16(slot, rows_[q] + offset, left > 0 ? 16 : 0, policy_);
      } else {
        ptx::cp_async_8(slot, rows_[q] + offset, left > 0 ? 8 : 0);
        ptx::cp_async_8(slot + 8, rows_[q] + offset + 8, left > 8 ? 8 : 0);
      }
    }
  }

 private:
  uint64_t policy_;
  const uint8_t* rows_[4];
  int half_k_, byte_;
  uint32_t slot_;
};

/// Scales of local row `lane`, which is global row `row`.
DEVICE_FN void load_scale_words(uint32_t stage, const uint8_t* scales, int k, int row, int unit, int lane) {
  const int k_tiles = scale_tiles_along_k(k);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int k_tile = 2 * unit + step;
    ptx::cp_async_4(stage + skinny::scale_offset(step, lane % 8, lane / 8),
                    scales + scale_tile_offset(row / kScaleTileRows, k_tile, k_tiles) +
                        scale_word_offset(row % kScaleTileRows),
                    k_tile < k_tiles ? 4 : 0);
  }
}

/// Scales of row tile `tile` of gemm_skinny/row_tile.cuh.
DEVICE_FN void load_scale_chunks(uint32_t stage, const uint8_t* scales, int k, int tile, int unit, int lane) {
  if (lane >= 16) return;
  const int k_tiles = scale_tiles_along_k(k);
  const int first = skinny::first_row(tile);
  const int k_tile = 2 * unit + lane / 8;
  ptx::cp_async_16(stage + skinny::kUnitWeightBytes + lane * 16,
                   scales + scale_tile_offset(first / kScaleTileRows, k_tile, k_tiles) +
                       (first % kScaleQuarterRows + lane % 8) * 16,
                   k_tile < k_tiles ? 16 : 0);
}

}  // namespace sm120::moe
