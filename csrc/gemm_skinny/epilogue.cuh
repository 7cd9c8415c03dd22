// out[token, n] = alpha * sum + bias, two neighbouring columns a thread. A thread's columns are the same for
// all its tokens (pair % 16 == thread % 16 everywhere in reduce.cuh), so alpha and bias are fetched once,
// early.
#pragma once

#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"
#include "row_tile.cuh"

namespace sm120::skinny {

class Epilogue {
 public:
  DEVICE_FN Epilogue(const Params& params, int first_token, int tile, int thread)
      : out_(static_cast<uint8_t*>(params.out) + 2 * first_token * params.out_stride),
        out_stride_(params.out_stride),
        column_(global_row(tile, 2 * (thread % (kTileRows / 2)))),
        inside_(column_ < params.n),
        type_(params.output_type) {
    // Only loads here; the first use is after the main loop.
    const int column = inside_ ? column_ : 0;
    alpha_.x = ptx::load_global_f32(params.alpha + (params.alpha_per_column ? column : 0));
    alpha_.y = ptx::load_global_f32(params.alpha + (params.alpha_per_column ? column + 1 : 0));
    bias_ = ptx::load_global_u32_if(
        params.bias != nullptr, static_cast<const uint8_t*>(params.bias) + 2 * static_cast<int64_t>(column));
  }

  DEVICE_FN void store(int token, const ptx::Float2& sum) const {
    if (!inside_) return;
    const bool bf16 = type_ == OutputType::kBfloat16;
    ptx::Float2 bias;
    if (bf16) {
      ptx::unpack_bf16x2(bias_, bias.x, bias.y);
    } else {
      ptx::unpack_f16x2(bias_, bias.x, bias.y);
    }
    const float x = sum.x * alpha_.x + bias.x;
    const float y = sum.y * alpha_.y + bias.y;
    const uint32_t packed = bf16 ? ptx::pack_bf16x2(x, y) : ptx::pack_f16x2(x, y);
    ptx::store_global_u32(out_ + 2 * (token * out_stride_ + column_), packed);
  }

 private:
  uint8_t* out_;
  int64_t out_stride_;
  int column_;
  bool inside_;
  OutputType type_;
  ptx::Float2 alpha_;
  uint32_t bias_;  // two values of the output type
};

}  // namespace sm120::skinny
