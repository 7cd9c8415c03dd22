// Activations that are not quantized yet: bf16 or fp16 rows become the fragments of tokens.cuh in registers,
// by the rule and with the bits of csrc/quantize. It saves the quantizer's launch; every CTA of a row tile
// and every row tile quantizes the same numbers again, so it pays for few tokens and little weight (plan.h).
//
// A quad (lanes t = 0..3 of token g) reads a k64 step of its row 16 bytes a lane at a time:
//
//   k of the step   0 .. 15    16 .. 31   32 .. 47   48 .. 63
//   block           0          1          2          3
//   lanes           0     1    2     3    0     1    2     3
//   register        b0    b0   b0    b0   b1    b1   b1    b1
//
// Eight numbers make one register of codes. Lanes 2j and 2j+1 hold the halves of a block and exchange their
// maxima; both then know the scale. Lanes t and t ^ 2 exchange these, and lane t = step puts the four bytes
// in order.
#pragma once

#include "../ptx/thread.cuh"
#include "../quantize/rounding.cuh"
#include "tokens.cuh"

namespace sm120::skinny {

template <quantize::InputType kType, int kTokenTiles>
class QuantizingTokenStream {
 public:
  /// What is on its way: four pairs of numbers for each register of codes.
  struct Fetched {
    uint32_t pairs[kTokenTiles][2][2][4];
  };
  static constexpr bool kFinishIsFree = false;

  DEVICE_FN QuantizingTokenStream(const QuantizingParams& params, const TokenBlock& block, int first,
                                  int lane)
      : numbers_(params.activations),
        last_byte_(2 * params.k - 16),
        byte_(2 * first * kUnitK + 16 * (lane % 4)),
        lane_(lane),
        encode_scale_(ptx::load_global_f32(params.encode_scale)) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int token = 8 * tile + lane / 4 < block.count ? 8 * tile + lane / 4 : block.count - 1;
      row_offset_[tile] = token * params.activation_stride;
    }
  }

  /// Start fetching the current unit and go on to the warp's next one. Blocks past the end of K repeat
  /// numbers of the last one; their scales are masked in mainloop.cuh.
  DEVICE_FN void load(Fetched& unit) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int byte = byte_ + 64 * i < last_byte_ ? byte_ + 64 * i : last_byte_;
        const ptx::Word4 loaded =
            ptx::load_global_u32x4(numbers_ + static_cast<uint32_t>(row_offset_[tile] + byte));
        uint32_t (&pairs)[4] = unit.pairs[tile][i / 2][i % 2];
        pairs[0] = loaded.x;
        pairs[1] = loaded.y;
        pairs[2] = loaded.z;
        pairs[3] = loaded.w;
      }
    }
    byte_ += 2 * kWarps * kUnitK;
  }

  /// Quantize what has been fetched. All lanes of the warp must be here.
  DEVICE_FN void finish(const Fetched& fetched, TokenUnit<kTokenTiles>& unit) const {
    const quantize::GlobalScale global = quantize::prepare<quantize::Rule::kReciprocal>(encode_scale_);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      uint32_t bytes = 0;  // scales of the blocks that this lane has a half of: step 0, step 1
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t (&pairs)[4] = fetched.pairs[tile][i / 2][i % 2];
        const uint32_t half = quantize::largest_pair<kType>(pairs);
        const uint32_t whole = quantize::larger_pair<kType>(half, ptx::shuffle_xor(half, 1));
        const auto scale = quantize::reciprocal_scale(quantize::magnitude_of<kType>(whole), global);
        unit.codes[i / 2][tile].reg[i % 2] = quantize::reciprocal_codes<kType, 0>(pairs, scale);
        bytes |= scale.byte << (8 * i);
      }
      const uint32_t others = ptx::shuffle_xor(bytes, 2);
      unit.scales[tile] = ptx::permute_bytes(bytes, others, lane_ % 2 == 0 ? 0x5140u : 0x7362u);
    }
  }

 private:
  const uint8_t* numbers_;
  int last_byte_, byte_, lane_;
  float encode_scale_;
  int row_offset_[kTokenTiles];
};

}  // namespace sm120::skinny
