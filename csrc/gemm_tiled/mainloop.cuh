// One unit of work of a warp: 4 mma tiles of 16 tokens x 8 mma tiles of 8 columns x 2 steps of k64.
#pragma once

#include "../ptx/ldmatrix.cuh"
#include "../ptx/memory.cuh"
#include "strip.cuh"

namespace sm120::tiled {

constexpr int kTilesA = kQuarters;      // mma tile q: tokens of quarter q
constexpr int kTilesB = 2 * kQuarters;  // mma tile 2 q + i: columns of quarter q

struct Accumulators {
  ptx::FragmentD tile[kTilesA][kTilesB];
};

/// Scale words of the four quarters, as one lane holds them.
struct ScaleWords {
  uint32_t of_quarter[kQuarters];
};

/// Scales past the end of K are padding that may hold anything; `blocks` are left in the lane's k64 step.
DEVICE_FN ScaleWords load_scales(uint32_t address, int blocks) {
  const ptx::Word4 words = ptx::load_shared_u32x4(address);
  const uint32_t mask = scale_mask(blocks);
  return {{words.x & mask, words.y & mask, words.z & mask, words.w & mask}};
}

/// A warp's view of a stage: where each lane reads. Offsets of the strips inside the stage are added once.
class WarpView {
 public:
  DEVICE_FN WarpView(uint32_t strip_a, uint32_t strip_b, int lane) : lane_(lane) {
    const int matrix = lane / 8;
    const int row = lane % 8;
    // A, matrices a0..a3: rows g, rows g + 8, then both again 16 bytes (32 k) further.
    codes_a_ = strip_a + code_offset(8 * (matrix % 2) + row, matrix / 2);
    // B, matrices b0, b1 of the first tile, then of the second.
    codes_b_ = strip_b + code_offset(column_row(matrix / 2, row), matrix % 2);
    const int g = lane / 4;
    const int t = lane % 4;
    scales_a_ = strip_a + scale_offset(t / 2, g + 8 * (t % 2));
    scales_b_ = strip_b + scale_offset(t % 2, column_row(t / 2, g));
  }

  /// Add the products of the unit in `stage`, of which `blocks` blocks lie inside K.
  DEVICE_FN void multiply(Accumulators& sums, uint32_t stage, int blocks) const {
    constexpr int kStepBlocks = kScaleTileK / kScaleBlock;
    const ScaleWords a = load_scales(stage + scales_a_, blocks - kStepBlocks * (lane_ % 4 / 2));
    const ScaleWords b = load_scales(stage + scales_b_, blocks - kStepBlocks * (lane_ % 2));
    multiply_step<0>(sums, stage, a, b);
    multiply_step<1>(sums, stage, a, b);
  }

 private:
  /// The slot of a chunk 2 * kStep further differs in one bit.
  template <int kStep>
  DEVICE_FN static uint32_t at_step(uint32_t address) {
    return address ^ (2 * kStep * 16);
  }

  template <int kStep>
  DEVICE_FN void multiply_step(Accumulators& sums, uint32_t stage, const ScaleWords& scales_a,
                               const ScaleWords& scales_b) const {
    const uint32_t codes_a = stage + at_step<kStep>(codes_a_);
    const uint32_t codes_b = stage + at_step<kStep>(codes_b_);
    ptx::FragmentA a[kTilesA];
#pragma unroll
    for (int q = 0; q < kTilesA; ++q) ptx::ldmatrix_x4(a[q], codes_a + q * kQuarterRows * kUnitRowBytes);
#pragma unroll
    for (int q = 0; q < kQuarters; ++q) {
      ptx::FragmentB first;
      ptx::FragmentB second;
      ptx::ldmatrix_x4(first, second, codes_b + q * kQuarterRows * kUnitRowBytes);
#pragma unroll
      for (int i = 0; i < kTilesA; ++i) {
        ptx::mma_nvfp4<kStep, kStep>(sums.tile[i][2 * q], a[i], first, scales_a.of_quarter[i],
                                     scales_b.of_quarter[q]);
      }
#pragma unroll
      for (int i = 0; i < kTilesA; ++i) {
        ptx::mma_nvfp4<kStep, kStep + 2>(sums.tile[i][2 * q + 1], a[i], second, scales_a.of_quarter[i],
                                         scales_b.of_quarter[q]);
      }
    }
  }

  int lane_;
  uint32_t codes_a_, codes_b_, scales_a_, scales_b_;
};

}  // namespace sm120::tiled
