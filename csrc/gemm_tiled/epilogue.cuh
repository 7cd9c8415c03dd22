// From accumulators to the output. A lane holds, for each row of an mma tile of A, four adjacent columns of
// every quarter (strip.cuh), so a quad writes 32 bytes in a row.
#pragma once

#include "../gemm/output.cuh"
#include "../ptx/thread.cuh"
#include "mainloop.cuh"

namespace sm120::tiled {

class Epilogue {
 public:
  /// For the strips of tokens and columns that start at these strip numbers.
  DEVICE_FN Epilogue(const Params& params, int strip_m, int strip_n, int lane)
      : params_(params), token_(first_row(strip_m) + lane / 4), column_(first_row(strip_n) + 4 * (lane % 4)) {
#pragma unroll
    for (int q = 0; q < kQuarters; ++q) {
      const int column = inside(q) ? column_ + q * kScaleQuarterRows : 0;
      columns_[q][0] = gemm::load_columns(params, column);
      columns_[q][1] = gemm::load_columns(params, column + 2);
    }
  }

  /// Write the outputs of mma tile `quarter` of A.
  DEVICE_FN void store(int quarter, const ptx::FragmentD (&tile)[kTilesB]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = token_ + quarter * kScaleQuarterRows + 8 * half;
      if (token >= params_.m) continue;
      uint8_t* row = static_cast<uint8_t*>(params_.out) + 2 * (token * params_.out_stride + column_);
#pragma unroll
      for (int q = 0; q < kQuarters; ++q) {
        if (!inside(q)) continue;
        const float* first = &tile[2 * q].reg[2 * half];
        const float* second = &tile[2 * q + 1].reg[2 * half];
        ptx::store_global_u32x2(row + 2 * q * kScaleQuarterRows,
                                gemm::finish(columns_[q][0], first[0], first[1], params_.output_type),
                                gemm::finish(columns_[q][1], second[0], second[1], params_.output_type));
      }
    }
  }

 private:
  /// n is a multiple of 8: four adjacent columns exist together.
  DEVICE_FN bool inside(int quarter) const { return column_ + quarter * kScaleQuarterRows < params_.n; }

  const Params& params_;
  int token_, column_;
  gemm::ColumnPair columns_[kQuarters][2];
};

/// Add the sums of the warps of a CTA that share one 64 x 64 tile, slice 0 first. Warp w is left with mma
/// tile w of A. `scratch` holds kTilesA * kTilesB * 512 bytes a slice; nobody may be using it.
template <int kSlices>
DEVICE_FN void add_slices(const Accumulators& mine, ptx::FragmentD (&total)[kTilesB], uint32_t scratch,
                          int slice, int lane) {
  static_assert(kSlices == kTilesA, "each slice finishes one mma tile of A");
  constexpr uint32_t kTileBytes = 16 * 8 * sizeof(float);
  constexpr uint32_t kSliceBytes = kTilesA * kTilesB * kTileBytes;
  const uint32_t own = scratch + slice * kSliceBytes + lane * 16;
#pragma unroll
  for (int i = 0; i < kTilesA; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesB; ++j) {
      const float* sum = mine.tile[i][j].reg;
      ptx::store_shared_f32x4(own + (i * kTilesB + j) * kTileBytes, {sum[0], sum[1], sum[2], sum[3]});
    }
  }
  ptx::sync_block();
  const uint32_t wanted = scratch + slice * kTilesB * kTileBytes + lane * 16;
#pragma unroll
  for (int j = 0; j < kTilesB; ++j) {
    total[j] = {};
#pragma unroll
    for (int from = 0; from < kSlices; ++from) {
      const ptx::Float4 part = ptx::load_shared_f32x4(wanted + from * kSliceBytes + j * kTileBytes);
      total[j].reg[0] += part.x;
      total[j].reg[1] += part.y;
      total[j].reg[2] += part.z;
      total[j].reg[3] += part.w;
    }
  }
}

}  // namespace sm120::tiled
