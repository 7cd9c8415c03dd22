// What becomes of the gate/up sums: alpha, the activation, NVFP4 codes and scales in the workspace. All in
// float32, rounded once, by the quantization (sglang_sm120/reference.py says the same).
//
// A token's 32 sums are in 16 lanes, two each. With a gate lanes 0..7 hold it and lanes 8..15 the other half,
// which they hand over; without one both halves are blocks of their own. Eight lanes then have one block of
// 16 numbers.
#pragma once

#include <cmath>

#include "../ptx/thread.cuh"
#include "../quantize/rounding.cuh"
#include "config.h"

namespace sm120::moe {

DEVICE_FN float silu_times(float gate, float up) {
  return gate / (1.0f + expf(-gate)) * up;
}

/// NaN stays NaN.
DEVICE_FN float relu_squared(float x) {
  return x < 0.0f ? 0.0f : x * x;
}

class ActivationWriter {
 public:
  /// `list` is where the pairs of the columns are, `tile` the CTA column of the grid.
  DEVICE_FN ActivationWriter(const Params& params, int tile, uint32_t expert, uint32_t list)
      : gated_(params.activation == Activation::kSilu),
        tile_(tile),
        list_(list),
        blocks_(params.intermediate / kBlock),
        codes_(params.workspace),
        scales_(params.workspace + code_row_bytes(params.intermediate) * params.m * params.top_k),
        code_row_(code_row_bytes(params.intermediate)),
        scale_row_(scale_row_bytes(params.intermediate)),
        alpha_(ptx::load_global_f32(params.w13_alpha + expert)),
        inner_(ptx::load_global_f32(params.inner_scale + (params.inner_scale_per_expert ? expert : 0))) {}

  /// See sums.cuh.
  DEVICE_FN void operator()(int column, int pair, const ptx::Float2& sum, bool live) const {
    const float x = sum.x * alpha_;
    const float y = sum.y * alpha_;
    const float other_x = ptx::shuffle_xor_f32(x, 8);
    const float other_y = ptx::shuffle_xor_f32(y, 8);
    const float low = gated_ ? silu_times(x, other_x) : relu_squared(x);
    const float high = gated_ ? silu_times(y, other_y) : relu_squared(y);

    float largest = fmaxf(fabsf(low), fabsf(high));  // fmaxf prefers a number to NaN, as the rule wants
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, ptx::shuffle_xor_f32(largest, mask));
    const quantize::ReciprocalScale scale =
        quantize::reciprocal_scale(largest, quantize::prepare<quantize::Rule::kReciprocal>(inner_));
    const float numbers[8] = {low * scale.factor, high * scale.factor};
    uint32_t codes = (ptx::convert_e2m1x8(numbers) & scale.mask & 0xFFu) << (8 * (pair % 4));
    codes |= ptx::shuffle_xor(codes, 1);
    codes |= ptx::shuffle_xor(codes, 2);

    const int block = gated_ ? tile_ : 2 * tile_ + pair / 8;
    if (!live || block >= blocks_ || (gated_ && pair >= 8)) return;
    const int64_t row = ptx::load_shared_u32(list_ + 4 * column);
    if (pair % 4 == 0) ptx::store_global_u32(codes_ + row * code_row_ + block * 8 + pair % 8, codes);
    if (pair % 8 == 0) ptx::store_global_u8(scales_ + row * scale_row_ + block, scale.byte);
  }

 private:
  bool gated_;
  int tile_;
  uint32_t list_;
  int blocks_;
  uint8_t* codes_;
  uint8_t* scales_;
  int64_t code_row_, scale_row_;
  float alpha_, inner_;
};

}  // namespace sm120::moe
