// The activation operand: a few tokens, read by every CTA, so they come from L2. They go straight to fragment
// registers: a quad reads 16 contiguous bytes of a row, and four-byte loads keep rows legal whose stride is
// odd in units of 16 bytes (k = 464: 232 bytes).
//
// No load is predicated. Tokens past m repeat the last one (their columns are never stored), and codes past
// the end of K repeat the last ones (their scales are masked to zero in mainloop.cuh).
#pragma once

#include "../layout/scale_layout.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/mma_nvfp4.cuh"
#include "config.h"

namespace sm120::skinny {

/// The tokens of one CTA. More than kMaxTokens of them are worked off in blocks, one grid row each.
struct TokenBlock {
  int first;
  int count;
};

SHARED_FN TokenBlock token_block(int m, int index) {
  const int left = m - index * kMaxTokens;
  return {index * kMaxTokens, left < kMaxTokens ? left : kMaxTokens};
}

/// Fragments of one unit: two k64 steps, kTokenTiles columns of 8 tokens.
template <int kTokenTiles>
struct TokenUnit {
  ptx::FragmentB codes[2][kTokenTiles];
  uint32_t scales[kTokenTiles];  // lanes t = 0 and 1 hold steps 0 and 1: scale selector B = step
};

template <int kTokenTiles>
class TokenStream {
 public:
  using Fetched = TokenUnit<kTokenTiles>;
  /// What has been fetched are fragments already: asking whether another unit follows costs more.
  static constexpr bool kFinishIsFree = true;

  DEVICE_FN TokenStream(const Params& params, const TokenBlock& block, int first, int lane)
      : codes_(params.activations + static_cast<int64_t>(block.first) * params.activation_stride),
        last_byte_(params.k / 2 - 4),
        last_tile_(scale_tiles_along_k(params.k) - 1),
        byte_(first * kUnitRowBytes + 4 * (lane % 4)),
        k_tile_(2 * first + lane % 2) {
    scales_ = params.activation_scales + scale_tile_offset(block.first / kScaleTileRows, 0, last_tile_ + 1);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int token = 8 * tile + lane / 4 < block.count ? 8 * tile + lane / 4 : block.count - 1;
      row_offset_[tile] = token * params.activation_stride;
      scale_offset_[tile] = scale_word_offset(block.first % kScaleTileRows + token);
    }
  }

  /// Start fetching the current unit and go on to the warp's next one. Nothing here may need a loaded value,
  /// not even a register move: the loads of all tiles and of the weights overlap only as long as nobody
  /// waits.
  DEVICE_FN void load(TokenUnit<kTokenTiles>& unit) {
    const int k_tile = k_tile_ < last_tile_ ? k_tile_ : last_tile_;
    int byte[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) byte[i] = byte_ + 16 * i < last_byte_ ? byte_ + 16 * i : last_byte_;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto offset = static_cast<uint32_t>(row_offset_[tile] + byte[i]);
        unit.codes[i / 2][tile].reg[i % 2] = ptx::load_global_u32(codes_ + offset);
      }
      const auto offset = static_cast<uint32_t>(k_tile * kScaleTileBytes + scale_offset_[tile]);
      unit.scales[tile] = ptx::load_global_u32(scales_ + offset);
    }
    byte_ += kWarps * kUnitRowBytes;
    k_tile_ += kWarps * kUnitK / kScaleTileK;
  }

  DEVICE_FN void finish(const Fetched& fetched, TokenUnit<kTokenTiles>& unit) const { unit = fetched; }

 private:
  const uint8_t* codes_;
  const uint8_t* scales_;
  int last_byte_, last_tile_, byte_, k_tile_;
  int row_offset_[kTokenTiles], scale_offset_[kTokenTiles];
};

}  // namespace sm120::skinny
