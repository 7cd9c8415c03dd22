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
  /// Of an expert. Its scales are asked for once, and awaited where the first sums are there.
  DEVICE_FN ActivationWriter(const Params& params, uint32_t expert)
      : params_(params),
        alpha_(ptx::load_global_f32(params.w13_alpha + expert)),
        inner_(ptx::load_global_f32(params.inner_scale + (params.inner_scale_per_expert ? expert : 0))) {}

  /// Of a tile; `list` is where the pairs of the columns are.
  DEVICE_FN ActivationWriter of(uint32_t list, int tile) const {
    ActivationWriter writer = *this;
    writer.list_ = list;
    writer.tile_ = tile;
    return writer;
  }

  /// See sums.cuh.
  DEVICE_FN void operator()(int column, int pair, const ptx::Float2& sum, bool live) const {
    const bool gated = params_.activation == Activation::kSilu;
    const float x = sum.x * alpha_;
    const float y = sum.y * alpha_;
    const float other_x = ptx::shuffle_xor_f32(x, 8);
    const float other_y = ptx::shuffle_xor_f32(y, 8);
    const float low = gated ? silu_times(x, other_x) : relu_squared(x);
    const float high = gated ? silu_times(y, other_y) : relu_squared(y);

    float largest = fmaxf(fabsf(low), fabsf(high));  // fmaxf prefers a number to NaN, as the rule wants
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, ptx::shuffle_xor_f32(largest, mask));
    const quantize::ReciprocalScale scale =
        quantize::reciprocal_scale(largest, quantize::prepare<quantize::Rule::kReciprocal>(inner_));
    const float numbers[8] = {low * scale.factor, high * scale.factor};
    uint32_t codes = (ptx::convert_e2m1x8(numbers) & scale.mask & 0xFFu) << (8 * (pair % 4));
    codes |= ptx::shuffle_xor(codes, 1);
    codes |= ptx::shuffle_xor(codes, 2);

    const int block = gated ? tile_ : 2 * tile_ + pair / 8;
    if (!live || block >= params_.intermediate / kBlock || (gated && pair >= 8)) return;
    const int64_t row = ptx::load_shared_u32(list_ + 4 * column);
    const int64_t code_row = code_row_bytes(params_.intermediate);
    if (pair % 4 == 0) {
      ptx::store_global_u32(params_.workspace + row * code_row + block * 8 + pair % 8, codes);
    }
    if (pair % 8 == 0) {
      const int64_t rows = int64_t{1} * params_.m * params_.top_k;
      ptx::store_global_u8(
          params_.workspace + rows * code_row + row * scale_row_bytes(params_.intermediate) + block,
          scale.byte);
    }
  }

 private:
  const Params& params_;
  float alpha_, inner_;
  uint32_t list_ = 0;
  int tile_ = 0;
};

}  // namespace sm120::moe
