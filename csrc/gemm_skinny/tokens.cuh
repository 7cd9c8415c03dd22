// The activation operand: a few tokens, read by every CTA, so they come from L2. They go straight to fragment
// registers: a quad reads 16 contiguous bytes of a row, and four-byte loads keep rows legal whose stride is
// odd in units of 16 bytes (k = 464: 232 bytes).
#pragma once

#include "../layout/scale_layout.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/mma_nvfp4.cuh"
#include "config.h"

namespace sm120::skinny {

/// Fragments of one unit: two k64 steps, kTokenTiles columns of 8 tokens.
template <int kTokenTiles>
struct TokenUnit {
  ptx::FragmentB codes[2][kTokenTiles];
  uint32_t scales[kTokenTiles];  // lanes t = 0 and 1 hold steps 0 and 1: scale selector B = step
};

template <int kTokenTiles>
class TokenStream {
 public:
  DEVICE_FN TokenStream(const Params& params, int lane)
      : stride_(params.activation_stride),
        m_(params.m),
        row_bytes_(params.k / 2),
        k_tiles_(scale_tiles_along_k(params.k)),
        token_(lane / 4),
        t_(lane % 4) {
    codes_ = params.activations + token_ * stride_ + 4 * t_;
    scales_ = params.activation_scales;
  }

  DEVICE_FN void load(TokenUnit<kTokenTiles>& unit_data, int unit) const {
    const int byte = unit * kUnitRowBytes + 4 * t_;
    const int k_tile = 2 * unit + t_ % 2;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int token = token_ + 8 * tile;
      const bool row = token < m_;
      const uint8_t* source = codes_ + 8 * tile * stride_ + static_cast<int64_t>(unit) * kUnitRowBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unit_data.codes[i / 2][tile].reg[i % 2] =
            ptx::load_global_u32_if(row && byte + 16 * i < row_bytes_, source + 16 * i);
      }
      const int64_t offset = scale_tile_offset(0, k_tile, k_tiles_) + scale_word_offset(token);
      unit_data.scales[tile] = ptx::load_global_u32_if(row && k_tile < k_tiles_, scales_ + offset);
    }
  }

 private:
  const uint8_t* codes_;
  const uint8_t* scales_;
  int64_t stride_;
  int m_, row_bytes_, k_tiles_, token_, t_;
};

}  // namespace sm120::skinny
