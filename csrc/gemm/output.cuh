// What happens to a float32 sum on its way out: out = round(alpha * sum + bias), one rounding, two
// neighbouring columns at a time.
#pragma once

#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"
#include "params.h"

namespace sm120::gemm {

/// alpha and bias of columns `column` and `column + 1`.
struct ColumnPair {
  ptx::Float2 alpha;
  uint32_t bias;  // two values of the output type
};

/// Only loads: nothing waits for them before the first use.
DEVICE_FN ColumnPair load_columns(const Params& params, int column) {
  ColumnPair pair;
  pair.alpha.x = ptx::load_global_f32(params.alpha + (params.alpha_per_column ? column : 0));
  pair.alpha.y = ptx::load_global_f32(params.alpha + (params.alpha_per_column ? column + 1 : 0));
  pair.bias = ptx::load_global_u32_if(
      params.bias != nullptr, static_cast<const uint8_t*>(params.bias) + 2 * static_cast<int64_t>(column));
  return pair;
}

/// Both outputs in one register, the lower column in the low half.
DEVICE_FN uint32_t finish(const ColumnPair& pair, float sum_x, float sum_y, OutputType type) {
  const bool bf16 = type == OutputType::kBfloat16;
  ptx::Float2 bias;
  if (bf16) {
    ptx::unpack_bf16x2(pair.bias, bias.x, bias.y);
  } else {
    ptx::unpack_f16x2(pair.bias, bias.x, bias.y);
  }
  const float x = sum_x * pair.alpha.x + bias.x;
  const float y = sum_y * pair.alpha.y + bias.y;
  return bf16 ? ptx::pack_bf16x2(x, y) : ptx::pack_f16x2(x, y);
}

}  // namespace sm120::gemm
