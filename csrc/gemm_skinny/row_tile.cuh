// Which weight rows a CTA owns and where a unit (32 rows x 128 k) sits in shared memory.
//
// Rows. In the 128x4 scale layout rows p, p+32, p+64 and p+96 share 16 bytes. A tile therefore takes 8
// consecutive p from each quarter q of a 128-row block: its scales are 128 contiguous bytes a k64 step and no
// byte is fetched twice.
//
//   128-row block          tile 1 (p = 8..15)         mma tiles of the CTA
//   q=0  rows  0.. 31      rows   8.. 15              tile j (0, 1):  row g     <- q = j,     p = g
//   q=1  rows 32.. 63      rows  40.. 47                              row g + 8 <- q = j + 2, p = g
//   q=2  rows 64.. 95      rows  72.. 79
//   q=3  rows 96..127      rows 104..111              local row = 8 q + p
//
// With this pairing the scale words that lane (g, t) needs for both mma tiles are adjacent (q = 2 (t % 2) and
// the next), and the two k64 steps of a unit go to lanes t / 2 = 0 and 1, which is what scale selector A
// wants.
//
// Weights in shared memory: 64 bytes (4 chunks of 16) a local row, chunk c of row r in slot c ^ (r / 2 % 4):
//
//   row 0: 0 1 2 3   row 2: 1 0 3 2   row 4: 2 3 0 1   row 6: 3 2 1 0      two rows fill the 32 banks; eight
//   rows of row 1: 0 1 2 3   row 3: 1 0 3 2   row 5: 2 3 0 1   row 7: 3 2 1 0      one chunk column touch
//   each bank once
//
// Scales follow: [k64 step][p][q] words, as in global memory.
#pragma once

#include "../layout/scale_layout.cuh"
#include "config.h"

namespace sm120::skinny {

/// First row (q = 0, p = 0) of tile `tile`.
SHARED_FN int first_row(int tile) {
  constexpr int kTilesPerBlock = kScaleTileRows / kTileRows;
  return tile / kTilesPerBlock * kScaleTileRows + tile % kTilesPerBlock * 8;
}

/// Output column of local row 8 q + p.
SHARED_FN int global_row(int tile, int local_row) {
  return first_row(tile) + local_row / 8 * kScaleQuarterRows + local_row % 8;
}

SHARED_FN int weight_offset(int local_row, int chunk) {
  return local_row * kUnitRowBytes + ((chunk ^ (local_row / 2 % 4)) * 16);
}

SHARED_FN int scale_offset(int step, int p, int q) {
  return kUnitWeightBytes + step * 128 + p * 16 + q * 4;
}

}  // namespace sm120::skinny
