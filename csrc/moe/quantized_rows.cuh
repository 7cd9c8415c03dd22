// The gate/up kernel's activations: rows of hidden, quantized by the CTA that multiplies them.
//
// Why here and not in a launch of its own: an expert has one to three tokens, so a warp quantizes its units
// of K with one or two rounds of 32 blocks (about 120 instructions each on SM12x, 220 decoded), beside 2,304
// bytes of weights a unit to wait for; a dependent launch costs 0.7 us, and could not serve scales that
// differ between experts. Each warp quantizes exactly what it multiplies, so no barrier of the CTA is needed.
// A row in shared memory: 64 bytes of codes a unit, then 8 of scales a unit.
#pragma once

#include "../gemm_skinny/tokens.cuh"
#include "../gemm_skinny/weights.cuh"
#include "../ptx/thread.cuh"
#include "../quantize/rounding.cuh"
#include "config.h"

namespace sm120::moe {

using quantize::InputType;

/// Rows of tokens that a CTA works on: `first` is where their list starts, `count` how many there are,
/// `base_unit` the first unit of K that the rows hold.
struct Rows {
  uint32_t list;
  uint32_t rows;
  int pitch, scales_at;
  int count;
  int base_unit;
};

/// One block of 16 numbers of a row and where it goes.
struct BlockTask {
  int row, unit, block;
};

template <InputType kType>
class RowQuantizer {
 public:
  DEVICE_FN RowQuantizer(const Params& params, const Rows& rows, const skinny::UnitRange& range, float scale,
                         int lane)
      : params_(params),
        rows_(rows),
        range_(range),
        global_(quantize::prepare<quantize::Rule::kReciprocal>(scale)),
        reciprocal_((1 << 16) / range.count + 1),
        lane_(lane) {}

  /// Quantize all units of the range; other lanes see them after the next sync_warp.
  DEVICE_FN void run() const {
    constexpr int kAtOnce = 2;  // loads of two rounds overlap
    const int tasks = range_.count * kUnitBlocks * rows_.count;
    for (int first = 0; first < tasks; first += 32 * kAtOnce) {
      uint32_t words[kAtOnce][kBlock / 2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + 32 * i < tasks) load(task_of(first + 32 * i + lane_, tasks), words[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + 32 * i < tasks) store(first + 32 * i + lane_, tasks, words[i]);
      }
    }
  }

 private:
  static constexpr int kUnitBlocks = skinny::kUnitK / kBlock;
  static constexpr int kMaxUnits = units_along(kMaxHiddenSize) / kWarps;  // of a warp
  static_assert(kColumns * kMaxUnits * kMaxUnits < 1 << 16, "turns divide exactly by a multiplication");

  /// Clamped: lanes without a task repeat the last one.
  DEVICE_FN BlockTask task_of(int index, int tasks) const {
    if (index >= tasks) index = tasks - 1;
    const int turn = index / kUnitBlocks;
    const int row = turn * reciprocal_ >> 16;
    const int unit = range_.first + (turn - row * range_.count) * kWarps;
    return {row, unit, unit * kUnitBlocks + index % kUnitBlocks};
  }

  DEVICE_FN void load(const BlockTask& task, uint32_t (&words)[kBlock / 2]) const {
    const int pair = static_cast<int>(ptx::load_shared_u32(rows_.list + 4 * task.row));
    const int last = params_.hidden_size / kBlock - 1;
    const auto* source = static_cast<const uint8_t*>(params_.hidden) +
                         2 * (pair / params_.top_k * params_.hidden_stride +
                              static_cast<int64_t>(task.block < last ? task.block : last) * kBlock);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ptx::Word4 loaded = ptx::load_global_u32x4(source + 16 * half);
      words[4 * half] = loaded.x;
      words[4 * half + 1] = loaded.y;
      words[4 * half + 2] = loaded.z;
      words[4 * half + 3] = loaded.w;
    }
  }

  /// Four neighbouring lanes have the blocks of one word of scales. Blocks past the end of K repeat the last
  /// one; multiply_unit masks their scales.
  DEVICE_FN void store(int index, int tasks, const uint32_t (&words)[kBlock / 2]) const {
    const BlockTask task = task_of(index, tasks);
    const quantize::Quantized out =
        quantize::quantize_block<kType, quantize::Rule::kReciprocal>(words, global_);
    uint32_t scales = out.scale << (8 * (lane_ % 4));
    scales |= ptx::shuffle_xor(scales, 1);
    scales |= ptx::shuffle_xor(scales, 2);
    if (index >= tasks) return;
    const uint32_t row = rows_.rows + task.row * rows_.pitch;
    const int block = task.block - rows_.base_unit * kUnitBlocks;
    ptx::store_shared_u32x2(row + block * 8, out.codes[0], out.codes[1]);
    if (lane_ % 4 == 0) ptx::store_shared_u32(row + rows_.scales_at + block, scales);
  }

  const Params& params_;
  const Rows& rows_;
  const skinny::UnitRange& range_;
  quantize::GlobalScale global_;
  int reciprocal_;
  int lane_;
};

/// The operand fragments of a warp's units, one after the other. Columns without a token repeat the last one;
/// nobody stores their sums.
class RowStream {
 public:
  DEVICE_FN RowStream(const Rows& rows, int first_unit, int lane) {
    const int column = lane / 4 < rows.count ? lane / 4 : rows.count - 1;
    const int local = first_unit - rows.base_unit;
    const uint32_t row = rows.rows + column * rows.pitch;
    codes_ = row + local * skinny::kUnitRowBytes + 4 * (lane % 4);
    scales_ = row + rows.scales_at + local * kUnitScales + 4 * (lane % 2);
  }

  /// The fragments of the current unit; go on to the warp's next one.
  DEVICE_FN skinny::TokenUnit<1> load() {
    skinny::TokenUnit<1> tokens;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tokens.codes[i / 2][0].reg[i % 2] = ptx::load_shared_u32(codes_ + 16 * i);
    }
    tokens.scales[0] = ptx::load_shared_u32(scales_);
    codes_ += kWarps * skinny::kUnitRowBytes;
    scales_ += kWarps * kUnitScales;
    return tokens;
  }

 private:
  static constexpr int kUnitScales = skinny::kUnitK / kBlock;  // bytes

  uint32_t codes_, scales_;
};

}  // namespace sm120::moe
