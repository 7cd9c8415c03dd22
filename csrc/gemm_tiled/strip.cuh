// A strip: the 64 rows of an operand that a warp multiplies, and where a unit of them (128 k) sits in shared
// memory. Both operands use the same strips.
//
// Rows. In the 128x4 scale layout rows p, p+32, p+64 and p+96 share 16 bytes. Strip h (0, 1) of a 128-row
// block therefore takes 16 consecutive p from each quarter q: its scales are 256 contiguous bytes a k64 step.
//
//   128-row block          strip 1 (p = 16..31)       local row = 16 q + p % 16
//   q=0  rows  0.. 31      rows  16.. 31
//   q=1  rows 32.. 63      rows  48.. 63
//   q=2  rows 64.. 95      rows  80.. 95
//   q=3  rows 96..127      rows 112..127
//
// Operand A (tokens): mma tile q is rows g and g + 8 of quarter q. The four tiles' scale words of a row are
// one 16-byte load; lane (g, t) fetches row g + 8 (t % 2) of k64 step t / 2, which is what scale selector A
// wants.
//
// Operand B (weights): mma tiles (q, 0) and (q, 1) share quarter q so that a lane ends up with four adjacent
// columns: tile column c is row 4 (c / 2) + c % 2, and two rows further in the second tile. The result
// registers of lane (g, t) are columns 4t, 4t + 1 of the first and 4t + 2, 4t + 3 of the second. Lane (g, t)
// fetches the scale words of tile t / 2 of all quarters for k64 step t % 2: scale selector B = step + 2 *
// tile.
//
// Codes in shared memory: 64 bytes (4 chunks of 16) a local row, chunk c of row r in slot c ^ f(r),
// f(r) = (r / 2 ^ r / 8 % 2) % 4. Two rows fill the 32 banks. The eight rows that a matrix of ldmatrix reads
// have each f twice, in an even and an odd row, so one chunk column of them touches each bank once:
//
//   A    rows 0 1 2 3 4 5 6 7     f: 0 0 1 1 2 2 3 3      rows 8..15            f: 1 1 0 0 3 3 2 2
//   B    rows 0 1 4 5 8 9 12 13   f: 0 0 2 2 1 1 3 3      rows 2 3 6 7 10 ..    f: 1 1 3 3 0 0 2 2
//
// Scales follow: [k64 step][p % 16][q] words, as in global memory.
#pragma once

#include "../layout/scale_layout.cuh"
#include "config.h"

namespace sm120::tiled {

constexpr int kQuarters = 4;
constexpr int kQuarterRows = kStripRows / kQuarters;
constexpr int kChunks = kUnitRowBytes / 16;
constexpr int kSteps = kUnitK / kScaleTileK;
constexpr int kStepScaleBytes = kStripRows * kScaleTileK / kScaleBlock;

/// First row of strip `strip` of an operand.
SHARED_FN int first_row(int strip) {
  return strip / 2 * kScaleTileRows + strip % 2 * kQuarterRows;
}

SHARED_FN int code_offset(int local_row, int chunk) {
  return local_row * kUnitRowBytes + ((chunk ^ ((local_row / 2 ^ local_row / 8 % 2) % 4)) * 16);
}

/// Scale words of rows p, p + 16, p + 32, p + 48 of the strip.
SHARED_FN int scale_offset(int step, int p) {
  return kStripCodeBytes + step * kStepScaleBytes + p * 16;
}

/// Row of B's quarter that is column `column` of its mma tile `tile` (0, 1).
SHARED_FN int column_row(int tile, int column) {
  return 4 * (column / 2) + 2 * tile + column % 2;
}

}  // namespace sm120::tiled
