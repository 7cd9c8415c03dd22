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
  DEVICE_FN Epilogue(const Params& params, int tile, int thread)
      : out_(static_cast<uint8_t*>(params.out)),
        out_stride_(params.out_stride),
        column_(global_row(tile, 2 * (thread % (kTileRows / 2)))),
        inside_(column_ < params.n),
        type_(params.output_type) {
    if (!inside_) return;
    alpha_.x = ptx::load_global_f32(params.alpha + (params.alpha_per_column ? column_ : 0));
    alpha_.y = params.alpha_per_column ? ptx::load_global_f32(params.alpha + column_ + 1) : alpha_.x;
    if (params.bias == nullptr) return;
    const uint32_t packed = ptx::load_global_u32_if(
        true, static_cast<const uint8_t*>(params.bias) + 2 * static_cast<int64_t>(column_));
    if (type_ == OutputType::kBfloat16) {
      ptx::unpack_bf16x2(packed, bias_.x, bias_.y);
    } else {
      ptx::unpack_f16x2(packed, bias_.x, bias_.y);
    }
  }

  DEVICE_FN void store(int token, const ptx::Float2& sum) const {
    if (!inside_) return;
    const float x = sum.x * alpha_.x + bias_.x;
    const float y = sum.y * alpha_.y + bias_.y;
    const uint32_t packed = type_ == OutputType::kBfloat16 ? ptx::pack_bf16x2(x, y) : ptx::pack_f16x2(x, y);
    ptx::store_global_u32(out_ + 2 * (token * out_stride_ + column_), packed);
  }

 private:
  uint8_t* out_;
  int64_t out_stride_;
  int column_;
  bool inside_;
  OutputType type_;
  ptx::Float2 alpha_ = {0.f, 0.f};
  ptx::Float2 bias_ = {0.f, 0.f};
};

}  // namespace sm120::skinny
