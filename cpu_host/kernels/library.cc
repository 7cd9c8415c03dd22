// The launchers of csrc/ as a shared library for the CPU, with a C interface for ctypes (library.py): the
// same kernels and the same choices between them. One call at a time. A kernel that breaks a rule of the
// emulated machine ends the process with status 3 and one line on stderr, as in the kernels' own tests.
// Functions return a cudaError_t.
#include <cstddef>
#include <cstdint>

#include "emulation/state.h"
#include "gemm/launch.h"
#include "gemm_skinny/launch.h"
#include "moe/launch.h"
#include "quantize/launch.h"

namespace {

using namespace sm120;
using enum emu::RegionKind;

void declare(const char* name, emu::RegionKind kind, const void* begin, size_t bytes) {
  if (begin != nullptr && bytes > 0) emu::declare_region(name, kind, begin, bytes);
}

size_t scale_bytes(int rows, int k) {
  return static_cast<size_t>((rows + 127) / 128) * ((k + 63) / 64) * 512;
}

size_t matrix_bytes(int rows, int64_t stride, int64_t width) {
  return rows == 0 ? 0 : static_cast<size_t>((rows - 1) * stride + width);
}

}  // namespace

// Sizes and strides as in gemm::Params. With an encode scale `a` are 16-bit numbers, of the type of the
// output, that the kernel quantizes, and there is no a_scale.
extern "C" int sm120_emulated_gemm(const uint8_t* a, const uint8_t* a_scale, const uint8_t* b,
                                   const uint8_t* b_scale, const float* alpha, const void* bias, void* out,
                                   int m, int n, int k, int a_stride, int b_stride, int64_t out_stride,
                                   int alpha_per_column, int float16, const float* encode_scale) {
  gemm::Params p = {};
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
  p.output_type = float16 != 0 ? gemm::OutputType::kFloat16 : gemm::OutputType::kBfloat16;

  emu::regions.clear();
  declare("a", kInput, a, matrix_bytes(m, a_stride, encode_scale == nullptr ? k / 2 : 2 * k));
  declare("a_scale", kInput, a_scale, scale_bytes(m, k));
  declare("encode scale", kInput, encode_scale, sizeof(float));
  declare("b", kWeights, b, matrix_bytes(n, b_stride, (k / 2 + 15) / 16 * 16));
  declare("b_scale", kWeights, b_scale, scale_bytes(n, k));
  declare("alpha", kInput, alpha, sizeof(float) * (alpha_per_column != 0 ? n : 1));
  declare("bias", kInput, bias, size_t{2} * n);
  declare("out", kOutput, out, 2 * matrix_bytes(m, out_stride, n));
  gemm::Device device = {};
  const cudaError_t error = gemm::current_device(&device);
  if (error != cudaSuccess) return error;
  const gemm::Plan plan = gemm::choose_plan(m, n, k, device);
  if (encode_scale == nullptr) return gemm::launch(p, plan, true, nullptr);
  const auto type = float16 != 0 ? quantize::InputType::kFloat16 : quantize::InputType::kBfloat16;
  return skinny::launch_quantizing_gemm(p, type, encode_scale, plan.skinny, true, nullptr);
}

extern "C" int sm120_emulated_quantizes_inside(int m, int n, int k) {
  gemm::Device device = {};
  return gemm::current_device(&device) == cudaSuccess && gemm::quantizes_inside(m, n, k, device) ? 1 : 0;
}

// As quantize::Params; `swizzled` and `exact` choose layout and rule.
extern "C" int sm120_emulated_quantize(const void* x, const float* global_scale, uint8_t* codes,
                                       uint8_t* scales, int64_t x_stride, int m, int k, int float16,
                                       int swizzled, int exact) {
  quantize::Params p = {};
  p.x = x;
  p.global_scale = global_scale;
  p.codes = codes;
  p.scales = scales;
  p.x_stride = x_stride;
  p.m = m;
  p.k = k;
  p.layout = swizzled != 0 ? quantize::Layout::kSwizzled : quantize::Layout::kLinear;

  emu::regions.clear();
  declare("x", kInput, x, 2 * matrix_bytes(m, x_stride, k));
  declare("global_scale", kInput, global_scale, sizeof(float));
  declare("codes", kOutput, codes, static_cast<size_t>(m) * k / 2);
  declare("scales", kOutput, scales, swizzled != 0 ? scale_bytes(m, k) : static_cast<size_t>(m) * k / 16);
  const auto type = float16 != 0 ? quantize::InputType::kFloat16 : quantize::InputType::kBfloat16;
  const auto rule = exact != 0 ? quantize::Rule::kExact : quantize::Rule::kReciprocal;
  return quantize::launch_quantize(p, type, rule, true, nullptr);
}

// As moe::Params; `workspace` has sm120_emulated_moe_workspace() bytes.
extern "C" int sm120_emulated_moe(const void* hidden, const int32_t* topk_ids, const float* topk_weights,
                                  const uint8_t* w13, const uint8_t* w13_scales, const float* w13_alpha,
                                  const float* input_scale, const uint8_t* w2, const uint8_t* w2_scales,
                                  const float* w2_alpha, const float* inner_scale, void* out,
                                  uint8_t* workspace, int64_t hidden_stride, int m, int top_k,
                                  int hidden_size, int intermediate, int experts, int first_expert,
                                  int input_scale_per_expert, int inner_scale_per_expert, int gate_first,
                                  int relu2, int float16) {
  moe::Params p = {};
  p.hidden = hidden;
  p.topk_ids = topk_ids;
  p.topk_weights = topk_weights;
  p.w13 = w13;
  p.w13_scales = w13_scales;
  p.w13_alpha = w13_alpha;
  p.input_scale = input_scale;
  p.w2 = w2;
  p.w2_scales = w2_scales;
  p.w2_alpha = w2_alpha;
  p.inner_scale = inner_scale;
  p.out = out;
  p.workspace = workspace;
  p.hidden_stride = hidden_stride;
  p.out_stride = hidden_size;
  p.m = m;
  p.top_k = top_k;
  p.hidden_size = hidden_size;
  p.intermediate = intermediate;
  p.experts = experts;
  p.first_expert = first_expert;
  p.input_scale_per_expert = input_scale_per_expert != 0;
  p.inner_scale_per_expert = inner_scale_per_expert != 0;
  p.gate_first = gate_first != 0;
  p.activation = relu2 != 0 ? moe::Activation::kRelu2 : moe::Activation::kSilu;
  p.type = float16 != 0 ? gemm::OutputType::kFloat16 : gemm::OutputType::kBfloat16;

  const int rows = moe::w13_rows(p);
  const auto pairs = static_cast<size_t>(m) * top_k;
  const auto count = static_cast<size_t>(experts);
  emu::regions.clear();
  declare("hidden", kInput, hidden, 2 * matrix_bytes(m, hidden_stride, hidden_size));
  // The second kernel reads the routing before its wait: it was written in front of the first one.
  declare("topk_ids", kWeights, topk_ids, sizeof(int32_t) * pairs);
  declare("topk_weights", kWeights, topk_weights, sizeof(float) * pairs);
  declare("w13", kWeights, w13, count * rows * hidden_size / 2);
  declare("w13_scales", kWeights, w13_scales, count * scale_bytes(rows, hidden_size));
  declare("w13_alpha", kInput, w13_alpha, sizeof(float) * count);
  declare("input_scale", kInput, input_scale, sizeof(float) * (input_scale_per_expert != 0 ? count : 1));
  declare("w2", kWeights, w2, count * hidden_size * intermediate / 2);
  declare("w2_scales", kWeights, w2_scales, count * scale_bytes(hidden_size, intermediate));
  declare("w2_alpha", kInput, w2_alpha, sizeof(float) * count);
  declare("inner_scale", kInput, inner_scale, sizeof(float) * (inner_scale_per_expert != 0 ? count : 1));
  declare("out", kOutput, out, size_t{2} * m * hidden_size);
  declare("workspace", kOutput, workspace, static_cast<size_t>(moe::workspace_bytes(m, top_k, intermediate)));
  after_launch = [] { emu::regions.back().kind = kInput; };
  gemm::Device device = {};
  cudaError_t error = gemm::current_device(&device);
  if (error == cudaSuccess) error = moe::launch_moe(p, device, true, nullptr);
  after_launch = nullptr;
  return error;
}

extern "C" int64_t sm120_emulated_moe_workspace(int m, int top_k, int intermediate) {
  return moe::workspace_bytes(m, top_k, intermediate);
}
