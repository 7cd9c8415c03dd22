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

/// The codes of 32 rows, from one unit of K on. A copy needs no arithmetic but the mask of its bytes: the
/// pointers go along with the units.
template <bool kAligned>
class CodeRows {
 public:
  DEVICE_FN CodeRows(int k, int lane)
      : policy_(ptx::policy_evict_first()),
        half_k_(k / 2),
        byte_(lane % 4 * 16),
        slot_(skinny::weight_offset(lane / 4, lane % 4)) {}

  /// Go to a unit; rows[q] is the row of `weights` that is local row 8 q + p for this lane's p = lane / 4.
  DEVICE_FN void move_to(const uint8_t* weights, const int (&rows)[4], int unit) {
    const int offset = unit * skinny::kUnitRowBytes + byte_;
    left_ = half_k_ - offset;
#pragma unroll
    for (int q = 0; q < 4; ++q) rows_[q] = weights + offset + static_cast<int64_t>(rows[q]) * half_k_;
  }

  /// Start the copies of the unit; bytes past the end of K become zeros.
  DEVICE_FN void load(uint32_t stage) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t slot = stage + slot_ + q * 8 * skinny::kUnitRowBytes;
      if constexpr (kAligned) {
        ptx::cp_async_16(slot, rows_[q], left_ > 0 ? 16 : 0, policy_);
      } else {
        ptx::cp_async_8(slot, rows_[q], left_ > 0 ? 8 : 0);
        ptx::cp_async_8(slot + 8, rows_[q] + 8, left_ > 8 ? 8 : 0);
      }
    }
  }

  /// Go to rows further down, `units` back along K.
  DEVICE_FN void move_down(int rows, int units) {
    const int64_t bytes = static_cast<int64_t>(rows) * half_k_ - units * skinny::kUnitRowBytes;
#pragma unroll
    for (int q = 0; q < 4; ++q) rows_[q] += bytes;
    left_ += units * skinny::kUnitRowBytes;
  }

  /// Go `kUnits` units further along the same rows.
  template <int kUnits>
  DEVICE_FN void advance() {
#pragma unroll
    for (int q = 0; q < 4; ++q) rows_[q] += kUnits * skinny::kUnitRowBytes;
    left_ -= kUnits * skinny::kUnitRowBytes;
  }

 private:
  uint64_t policy_;
  const uint8_t* rows_[4];
  int half_k_, byte_, left_;
  uint32_t slot_;
};

/// Where this lane's part of a unit's scales comes from: what CodeRows is for codes. Words: four bytes of
/// local row `lane` a k64 step. Chunks: 16 bytes of lanes 0..15, eight a step, for tiles of
/// gemm_skinny/row_tile.cuh.
class ScaleRows {
 public:
  DEVICE_FN ScaleRows(int k, int lane) : k_tiles_(scale_tiles_along_k(k)), lane_(lane) {}

  /// Go to the words of row `row` at a unit.
  DEVICE_FN void move_to_words(const uint8_t* scales, uint32_t row, int unit) {
    tiles_left_ = k_tiles_ - kUnitTiles * unit;
    source_ =
        scales + unit * (kUnitTiles * kScaleTileBytes) +
        static_cast<uint64_t>(row / kScaleTileRows) * static_cast<uint32_t>(k_tiles_ * kScaleTileBytes) +
        scale_word_offset(static_cast<int>(row % kScaleTileRows));
  }

  DEVICE_FN void load_words(uint32_t stage) const {
#pragma unroll
    for (int step = 0; step < kUnitTiles; ++step) {
      ptx::cp_async_4(stage + skinny::scale_offset(step, lane_ % 8, lane_ / 8),
                      source_ + step * kScaleTileBytes, step < tiles_left_ ? 4 : 0);
    }
  }

  /// Go to the chunks of row tile `tile` at a unit.
  DEVICE_FN void move_to_chunks(const uint8_t* scales, int tile, int unit) {
    const int k_tile = kUnitTiles * unit + lane_ / 8;
    const int first = skinny::first_row(tile);
    tiles_left_ = k_tiles_ - k_tile;
    source_ = scales + scale_tile_offset(first / kScaleTileRows, k_tile, k_tiles_) +
              (first % kScaleQuarterRows + lane_ % 8) * 16;
  }

  DEVICE_FN void load_chunks(uint32_t stage) const {
    if (lane_ >= 16) return;
    ptx::cp_async_16(stage + skinny::kUnitWeightBytes + lane_ * 16, source_, tiles_left_ > 0 ? 16 : 0);
  }

  /// Go `kUnits` units further along K.
  template <int kUnits>
  DEVICE_FN void advance() {
    source_ += kUnits * kUnitTiles * kScaleTileBytes;
    tiles_left_ -= kUnits * kUnitTiles;
  }

 private:
  static constexpr int kUnitTiles = skinny::kUnitK / kScaleTileK;

  const uint8_t* source_;
  int k_tiles_, lane_, tiles_left_;
};

}  // namespace sm120::moe
