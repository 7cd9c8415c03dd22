// The kernels of csrc/ as a shared library for the CPU, with a C interface for ctypes (library.py). Every CUDA thread
// runs in the emulated thread block, one call at a time. A kernel that breaks a rule of the machine ends the process
// with status 3 and one line on stderr, as in the kernels' own tests.
#include <cstddef>
#include <cstdint>

#include "emulation/state.h"
#include "gemm_skinny/kernel.cuh"
#include "quantize/kernel.cuh"

namespace {

using namespace sm120;

// What the launchers ask a device for: the RTX 5090's, so that the same choices are made.
constexpr int kSmCount = 170;
constexpr uint64_t kSeed = 1;

void declare(const char* name, emu::RegionKind kind, const void* begin, size_t bytes) {
  if (begin != nullptr && bytes > 0) emu::declare_region(name, kind, begin, bytes);
}

using Gemm = void (*)(skinny::Params);

Gemm kernel_for(int token_tiles) {
  switch (token_tiles) {
    case 1:
      return skinny::gemm_kernel<1, skinny::kRingStages>;
    case 2:
      return skinny::gemm_kernel<2, skinny::kRingStages>;
    case 4:
      return skinny::gemm_kernel<4, skinny::kRingStages>;
    default:
      return skinny::gemm_kernel<8, skinny::kRingStages>;
  }
}

size_t scale_bytes(int rows, int k) {
  return static_cast<size_t>((rows + 127) / 128) * ((k + 63) / 64) * 512;
}

}  // namespace

// Sizes and strides as in skinny::Params; float16 is the output type.
extern "C" void sm120_emulated_gemm(const uint8_t* a, const uint8_t* a_scale, const uint8_t* b, const uint8_t* b_scale,
                                    const float* alpha, const void* bias, void* out, int m, int n, int k, int a_stride,
                                    int b_stride, int64_t out_stride, int alpha_per_column, int float16) {
  if (m == 0 || n == 0) return;
  skinny::Params p = {};
  p.activations = a;
  p.activation_scales = a_scale;
  p.weights = b;
  p.weight_scales = b_scale;
  p.alpha = alpha;
  p.bias = bias;
  p.out = out;
  p.activation_stride = a_stride;
  p.weight_stride = b_stride;
  p.out_stride = out_stride;
  p.m = m;
  p.n = n;
  p.k = k;
  p.alpha_per_column = alpha_per_column != 0;
  p.output_type = float16 != 0 ? skinny::OutputType::kFloat16 : skinny::OutputType::kBfloat16;
  const skinny::Config config = skinny::choose_config(m, n, k, kSmCount, skinny::kMaxCluster);
  while (1 << p.cluster_shift < config.cluster) ++p.cluster_shift;

  using enum emu::RegionKind;
  const auto rows = [](int count, int64_t stride, int64_t width) {
    return static_cast<size_t>((count - 1) * stride + width);
  };
  emu::regions.clear();
  declare("a", kInput, a, rows(m, a_stride, k / 2));
  declare("a_scale", kInput, a_scale, scale_bytes(m, k));
  declare("b", kWeights, b, rows(n, b_stride, (k / 2 + 15) / 16 * 16));
  declare("b_scale", kWeights, b_scale, scale_bytes(n, k));
  declare("alpha", kInput, alpha, sizeof(float) * (alpha_per_column != 0 ? n : 1));
  declare("bias", kInput, bias, size_t{2} * n);
  declare("out", kOutput, out, 2 * rows(m, out_stride, n));
  const Gemm kernel = kernel_for(config.token_tiles);
  emu::launch({skinny::row_tiles(n) * config.cluster, skinny::token_blocks(m), config.cluster, skinny::kThreads,
               static_cast<uint32_t>(skinny::shared_bytes(skinny::kRingStages, config.token_tiles)), kSeed},
              [&] { kernel(p); });
}

// As quantize::Params; `swizzled` and `exact` choose layout and rule.
extern "C" void sm120_emulated_quantize(const void* x, const float* global_scale, uint8_t* codes, uint8_t* scales,
                                        int64_t x_stride, int m, int k, int float16, int swizzled, int exact) {
  if (m == 0) return;
  quantize::Params p = {};
  p.x = x;
  p.global_scale = global_scale;
  p.codes = codes;
  p.scales = scales;
  p.x_stride = x_stride;
  p.m = m;
  p.k = k;
  p.input_type = float16 != 0 ? quantize::InputType::kFloat16 : quantize::InputType::kBfloat16;
  p.layout = swizzled != 0 ? quantize::Layout::kSwizzled : quantize::Layout::kLinear;
  p.rule = exact != 0 ? quantize::Rule::kExact : quantize::Rule::kReciprocal;

  using enum emu::RegionKind;
  emu::regions.clear();
  declare("x", kInput, x, 2 * static_cast<size_t>((m - 1) * x_stride + k));
  declare("global_scale", kInput, global_scale, sizeof(float));
  declare("codes", kOutput, codes, static_cast<size_t>(m) * k / 2);
  declare("scales", kOutput, scales, swizzled != 0 ? scale_bytes(m, k) : static_cast<size_t>(m) * k / 16);
  const auto items = quantize::work_items(m, k, p.layout);
  const int grid = static_cast<int>((items + quantize::kThreads - 1) / quantize::kThreads);
  emu::launch({grid, 1, 1, quantize::kThreads, 0, kSeed}, [&] { quantize::quantize_kernel(p); });
}
