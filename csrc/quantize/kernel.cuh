// Activations to NVFP4: one thread a block of 16, so that one token still spreads over K / 16 threads. What
// bounds it is the launch at few tokens and the bytes at many: 2 read and 0.5625 written an element.
//
// Padding of the swizzled scales is written too (zeros): consumers that read whole 128x4 tiles rely on it.
#pragma once

#include "../layout/scale_layout.cuh"
#include "../ptx/grid_dependency.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/thread.cuh"
#include "rounding.cuh"

namespace sm120::quantize {

DEVICE_FN void load_block(const Params& params, int row, int block, float (&x)[kBlock]) {
  const auto* source = static_cast<const uint8_t*>(params.x) +
                       2 * (row * params.x_stride + static_cast<int64_t>(block) * kBlock);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ptx::Word4 words = ptx::load_global_u32x4(source + 16 * half);
    const uint32_t packed[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& low = x[8 * half + 2 * i];
      float& high = x[8 * half + 2 * i + 1];
      if (params.input_type == InputType::kBfloat16) {
        ptx::unpack_bf16x2(packed[i], low, high);
      } else {
        ptx::unpack_f16x2(packed[i], low, high);
      }
    }
  }
}

DEVICE_FN uint8_t* scale_address(const Params& params, int row, int block) {
  if (params.layout == Layout::kLinear) {
    return params.scales + static_cast<int64_t>(row) * (params.k / kBlock) + block;
  }
  return params.scales + scale_tile_offset(row / kScaleTileRows, block / 4, scale_tiles_along_k(params.k)) +
         scale_word_offset(row % kScaleTileRows) + block % 4;
}

KERNEL_FN void __launch_bounds__(kThreads) quantize_kernel(const GRID_CONSTANT Params params) {
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
  const int64_t item = static_cast<int64_t>(ptx::block_index()) * kThreads + ptx::thread_index();
  if (item >= work_items(params.m, params.k, params.layout)) return;
  const int blocks = params.k / kBlock;
  const int columns = params.layout == Layout::kLinear ? blocks : scale_tiles_along_k(params.k) * 4;
  const int64_t real = static_cast<int64_t>(params.m) * columns;
  if (item >= real) {  // a word of a padding row
    const int64_t word = item - real;
    const int row = params.m + static_cast<int>(word / (columns / 4));
    ptx::store_global_u32(scale_address(params, row, static_cast<int>(word % (columns / 4)) * 4), 0u);
    return;
  }
  const int row = static_cast<int>(item / columns);
  const int block = static_cast<int>(item % columns);
  if (block >= blocks) {
    ptx::store_global_u8(scale_address(params, row, block), 0u);
    return;
  }
  float x[kBlock];
  load_block(params, row, block, x);
  const float global_scale = ptx::load_global_f32(params.global_scale);
  const Quantized out =
      params.rule == Rule::kExact ? quantize_exact(x, global_scale) : quantize_reciprocal(x, global_scale);
  ptx::store_global_u8(scale_address(params, row, block), out.scale);
  ptx::store_global_u32x2(params.codes + (static_cast<int64_t>(row) * blocks + block) * 8, out.codes[0],
                          out.codes[1]);
}

}  // namespace sm120::quantize
