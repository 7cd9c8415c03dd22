// The 128x4 swizzle of NVFP4 block scales, as cuBLAS, CUTLASS, FlashInfer and SGLang store them.
//
// Scales of 128 rows x 4 blocks (64 elements of K) form 512 contiguous bytes; inside, row r and block c sit
// at (r % 32) * 16 + (r / 32) * 4 + c:
//
//   byte   0 ..  3   row  0, blocks 0..3      byte  16   row 1      ...      byte 496   row  31
//          4 ..  7   row 32                         20   row 33                    500   row  63
//          8 .. 11   row 64                         24   row 65                    504   row  95
//         12 .. 15   row 96                         28   row 97                    508   row 127
//
// 512-byte pieces follow each other along K first, then along rows. Rows are padded to 128, blocks to 4.
#pragma once

#include "../ptx/target.cuh"

namespace sm120 {

constexpr int kScaleBlock = 16;      // elements of K that share a scale
constexpr int kScaleTileRows = 128;  // rows of one 512-byte piece
constexpr int kScaleTileK = 64;      // elements of K of one piece
constexpr int kScaleTileBytes = 512;
constexpr int kScaleQuarterRows = 32;  // rows r, r + 32, r + 64, r + 96 share one 16-byte chunk

SHARED_FN int scale_tiles_along_k(int k) {
  return (k + kScaleTileK - 1) / kScaleTileK;
}

/// Byte offset of the piece that holds `row_tile` (rows 128 * row_tile ..) and `k_tile` (k 64 * k_tile ..).
SHARED_FN int64_t scale_tile_offset(int row_tile, int k_tile, int k_tiles) {
  return (static_cast<int64_t>(row_tile) * k_tiles + k_tile) * kScaleTileBytes;
}

/// Byte offset inside its piece of the four scales of row `row` (0..127).
SHARED_FN int scale_word_offset(int row) {
  return (row % kScaleQuarterRows) * 16 + (row / kScaleQuarterRows) * 4;
}

/// Mask that keeps the first `blocks` bytes of a word of four scales: padding is never data, it may be NaN.
SHARED_FN uint32_t scale_mask(int blocks) {
  return blocks >= 4 ? 0xFFFFFFFFu : blocks <= 0 ? 0u : (1u << (8 * blocks)) - 1u;
}

}  // namespace sm120
