// One operand's way from global to shared memory: a group of warps copies its strips unit by unit with
// cp.async. Rows past the end and bytes past the end of K are not read; zeros take their place.
#pragma once

#include "../ptx/cp_async.cuh"
#include "strip.cuh"

namespace sm120::tiled {

/// kStrips strips of one 128-row block, copied by kGroupThreads threads, every kUnitStep-th unit of K. The
/// pointers are the same for all threads of a warp and stay in uniform registers.
template <int kStrips, int kGroupThreads, int kUnitStep>
class OperandStream {
 public:
  /// `codes` and `scales` are the whole operand of `rows` rows; the strips start at strip `first`, the units
  /// at unit `unit`.
  DEVICE_FN OperandStream(const uint8_t* codes, int stride, const uint8_t* scales, int rows, int first, int k,
                          int unit, int thread)
      : stride_(stride) {
    const int chunk = thread % kChunks;
    const int row = thread / kChunks;
    codes_ = codes + static_cast<int64_t>(first_row(first)) * stride + unit * kUnitRowBytes;
    code_offset_ = static_cast<uint32_t>(row) * static_cast<uint32_t>(stride) + chunk * 16;
    rows_left_ = rows - first_row(first) - row;
    bytes_left_ = k / 2 - unit * kUnitRowBytes - chunk * 16;
    code_slot_ = strip_base(row) + code_offset(row % kQuarterRows, chunk);

    const int p = thread % kWidth;
    const int step = thread / kWidth;
    const int k_tiles = scale_tiles_along_k(k);
    scales_ = scales + scale_tile_offset(first / 2, kSteps * unit, k_tiles) + first % 2 * kQuarterRows * 16;
    scale_offset_ = step * kScaleTileBytes + p * 16;
    scale_slot_ = strip_base(p) + scale_offset(step, p % kQuarterRows);
    tiles_left_ = k_tiles - kSteps * unit - step;
    copies_scales_ = step < kSteps;
  }

  /// Start the copies of the current unit to `stage` and go on to the next. kWholeChunks: every row starts at
  /// a multiple of 16 bytes, else of 8.
  template <bool kWholeChunks>
  DEVICE_FN void load(uint32_t stage) {
    // 0, 8 or 16: k is a multiple of 16.
    const int inside = bytes_left_ < 0 ? 0 : bytes_left_ > 16 ? 16 : bytes_left_;
#pragma unroll
    for (int i = 0; i < kPasses * kQuarters; ++i) {
      const int quarter = i / kPasses;
      const int p = i % kPasses * kPassRows;
      const int row = quarter * kScaleQuarterRows + p;
      const int bytes = row < rows_left_ ? inside : 0;
      const uint8_t* source =
          codes_ + (code_offset_ + static_cast<uint32_t>(row) * static_cast<uint32_t>(stride_));
      // Eight rows further the swizzle differs in one bit.
      const uint32_t slot =
          stage + (code_slot_ ^ (p / 8 % 2 * 16)) + (quarter * kQuarterRows + p) * kUnitRowBytes;
      if constexpr (kWholeChunks) {
        ptx::cp_async_16(slot, source, bytes);
      } else {
        ptx::cp_async_8(slot, source, bytes < 8 ? bytes : 8);
        ptx::cp_async_8(slot + 8, source + 8, bytes < 16 ? 0 : 8);
      }
    }
    if (copies_scales_) {
      ptx::cp_async_16(stage + scale_slot_, scales_ + scale_offset_, tiles_left_ > 0 ? 16 : 0);
    }
    codes_ += kUnitStep * kUnitRowBytes;
    bytes_left_ -= kUnitStep * kUnitRowBytes;
    scales_ += kUnitStep * kSteps * kScaleTileBytes;
    tiles_left_ -= kUnitStep * kSteps;
  }

 private:
  static constexpr int kWidth = kStrips * kQuarterRows;      // rows of a quarter that belong to the strips
  static constexpr int kPassRows = kGroupThreads / kChunks;  // rows that the group copies at once
  static constexpr int kPasses = kWidth / kPassRows;         // to cover a quarter
  static_assert(kPasses * kPassRows == kWidth && kSteps * kWidth <= kGroupThreads);
  static_assert(kPassRows % 8 == 0, "a pass moves the swizzle by whole groups of eight rows");

  SHARED_FN static uint32_t strip_base(int p) { return p / kQuarterRows * kStripBytes; }

  const uint8_t* codes_;
  const uint8_t* scales_;
  int stride_, rows_left_, bytes_left_, tiles_left_;
  uint32_t code_offset_, code_slot_, scale_offset_, scale_slot_;
  bool copies_scales_;
};

}  // namespace sm120::tiled
