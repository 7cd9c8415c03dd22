// Activations to NVFP4. What bounds it is the launch at few tokens and the bytes at many: 2 read and 0.5625
// written an element.
//
// The 128x4 swizzle keeps the scales of rows p, p+32, p+64 and p+96 of a 128-row tile together, 4 bytes each.
// So a warp takes row slot p of a tile and 32 neighbouring blocks of K, and each thread one block in one or
// all four of these rows: all loads are issued before the first is used, and after an exchange between four
// lanes every lane stores one word of scales, four lanes 16 contiguous bytes.
//
//            blocks 0 1 2 3    4 5 6 7   ...
//   row p           a b c d                  lanes a..d have a byte of each row; afterwards
//   row p+32        a b c d                  a holds the word of row p, b of p+32, c of p+64, d of p+96
//   row p+64        a b c d
//   row p+96        a b c d
//
// Padding of the swizzled scales is written by the same threads (zeros), because consumers that read whole
// tiles rely on it: rows from m on and blocks from k / 16 on count as blocks of zeros.
#pragma once

#include "../layout/scale_layout.cuh"
#include "../ptx/grid_dependency.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/thread.cuh"
#include "rounding.cuh"

namespace sm120::quantize {

/// Where a thread works: `quarter` is that of its first row.
struct Place {
  int tile, quarter, slot;
  int block;

  DEVICE_FN int row(int i) const { return tile * kScaleTileRows + (quarter + i) * kScaleQuarterRows + slot; }
};

template <int kRows>
DEVICE_FN Place place_of(int group, int thread) {
  const int slot = group * kWarps + thread / 32;  // counts slots, or rows if a thread has only one
  const int block = ptx::block_index() * 32 + thread % 32;
  const int p = slot % kScaleQuarterRows;
  if constexpr (kRows == 4) return {slot / kScaleQuarterRows, 0, p, block};
  return {slot / kScaleTileRows, slot % kScaleTileRows / kScaleQuarterRows, p, block};
}

DEVICE_FN void load_block(const Params& params, int row, int block, uint32_t (&words)[kBlock / 2]) {
  const auto* source = static_cast<const uint8_t*>(params.x) +
                       2 * (row * params.x_stride + static_cast<int64_t>(block) * kBlock);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ptx::Word4 loaded = ptx::load_global_u32x4(source + 16 * half);
    words[4 * half] = loaded.x;
    words[4 * half + 1] = loaded.y;
    words[4 * half + 2] = loaded.z;
    words[4 * half + 3] = loaded.w;
  }
}

/// Bytes of four lanes, transposed: lane j of the four gets byte j of each.
DEVICE_FN uint32_t transpose_bytes(uint32_t bytes, int lane) {
  uint32_t other = ptx::shuffle_xor(bytes, 1);
  bytes = ptx::permute_bytes(bytes, other, lane % 2 == 0 ? 0x6240u : 0x3715u);
  other = ptx::shuffle_xor(bytes, 2);
  return ptx::permute_bytes(bytes, other, lane / 2 % 2 == 0 ? 0x5410u : 0x3276u);
}

/// Byte q of `bytes` is the scale of row slot + 32 * q of the tile, zero for rows of other threads and
/// padding.
template <int kRows>
DEVICE_FN void store_swizzled(const Params& params, const Place& place, uint32_t bytes, int lane) {
  const uint32_t word = transpose_bytes(bytes, lane);
  const int k_tiles = scale_tiles_along_k(params.k);
  const int quarter = lane % 4;
  bool mine = place.block / 4 < k_tiles;
  if constexpr (kRows == 1) {
    // The quarters behind the last one that has rows are nobody else's.
    const bool last = (place.tile * 4 + place.quarter + 1) * kScaleQuarterRows >= params.m;
    mine = mine && (quarter == place.quarter || (last && quarter > place.quarter));
  }
  if (!mine) return;
  ptx::store_global_u32(params.scales + scale_tile_offset(place.tile, place.block / 4, k_tiles) +
                            scale_word_offset(quarter * kScaleQuarterRows + place.slot),
                        word);
}

template <int kRows>
DEVICE_FN void store_linear(const Params& params, const Place& place, uint32_t bytes) {
  const int blocks = params.k / kBlock;
  for (int i = 0; i < kRows; ++i) {
    const int64_t index = static_cast<int64_t>(place.row(i)) * blocks + place.block;
    if (place.row(i) < params.m && place.block < blocks) {
      ptx::store_global_u8(params.scales + index, bytes >> (8 * (place.quarter + i)));
    }
  }
}

template <InputType kType, Rule kRule, int kRows>
KERNEL_FN void __launch_bounds__(kThreads) quantize_kernel(const GRID_CONSTANT Params params) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int lane = ptx::thread_index() % 32;
  const Place place = place_of<kRows>(ptx::block_index_y(), ptx::thread_index());
  uint32_t scale_bytes = 0;
  if (place.row(0) < params.m) {  // the same for the whole warp
    const int blocks = params.k / kBlock;
    uint32_t words[kRows][kBlock / 2];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {  // clamped instead of skipped: no branch keeps the loads apart
      load_block(params, place.row(i) < params.m ? place.row(i) : params.m - 1,
                 place.block < blocks ? place.block : blocks - 1, words[i]);
    }
    const GlobalScale global = prepare<kRule>(ptx::load_global_f32(params.global_scale));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Quantized out = quantize_block<kType, kRule>(words[i], global);
      if (place.row(i) < params.m && place.block < blocks) {
        scale_bytes |= out.scale << (8 * (place.quarter + i));
        const int64_t index = static_cast<int64_t>(place.row(i)) * blocks + place.block;
        ptx::store_global_u32x2(params.codes + index * 8, out.codes[0], out.codes[1]);
      }
    }
  }
  if (params.layout == Layout::kSwizzled) {
    store_swizzled<kRows>(params, place, scale_bytes, lane);
  } else {
    store_linear<kRows>(params, place, scale_bytes);
  }
}

}  // namespace sm120::quantize
