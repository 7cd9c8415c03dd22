// The entry of the mixture-of-experts layer.
#include <tvm/ffi/function.h>

#include <string>

#include "../gemm/launch.h"
#include "../moe/launch.h"
#include "checks.h"

namespace sm120 {
namespace {

using namespace binding;

/// One stack of expert weights: [experts, rows, k / 2] with one swizzled scale buffer an expert.
void check_stack(const TensorView& weights, const TensorView& scales, const TensorView& alpha,
                 const std::string& name, int64_t experts, int64_t rows, int64_t k) {
  SM120_REQUIRE(weights.ndim() == 3 && is_dtype(weights, kDLUInt, 8) && weights.size(0) == experts &&
                    weights.size(1) == rows && weights.size(2) == k / 2 && is_dense(weights) &&
                    aligned(weights, 16),
                name + " must be contiguous, 16-byte aligned uint8 [" + std::to_string(experts) + ", " +
                    std::to_string(rows) + ", " + std::to_string(k / 2) + "]");
  SM120_REQUIRE(
      is_byte(scales) && is_dense(scales) && aligned(scales, 16) &&
          numel(scales) == experts * scale_bytes(rows, k),
      name + "_scale must be contiguous, 16-byte aligned uint8 or float8_e4m3fn, for each expert one " +
          "buffer in the 128x4 order, padded to 128 rows and 4 columns");
  SM120_REQUIRE(
      is_dtype(alpha, kDLFloat, 32) && is_dense(alpha) && numel(alpha) == experts,
      name + "_alpha must be float32 with one value for each of " + std::to_string(experts) + " experts");
}

/// Whether an encode scale is one per expert.
bool is_per_expert(const TensorView& scale, const std::string& name, int64_t experts) {
  const int64_t count = numel(scale);
  SM120_REQUIRE(is_dtype(scale, kDLFloat, 32) && is_dense(scale) && (count == 1 || count == experts),
                name + "_input_scale must be float32, one value or one for each expert");
  return count == experts && experts > 1;
}

/// hidden [m, H] -> out [m, H], the weighted sum of the experts [first_expert, first_expert + experts) that
/// each token chose. `activation` is moe::Activation; the workspace is scratch.
void nvfp4_moe(TensorView hidden, TensorView topk_ids, TensorView topk_weights, TensorView w13,
               TensorView w13_scale, TensorView w13_alpha, TensorView w13_input_scale, TensorView w2,
               TensorView w2_scale, TensorView w2_alpha, TensorView w2_input_scale, TensorView out,
               TensorView workspace, int64_t activation, bool gate_first, int64_t first_expert,
               bool dependent_launch) {
  const DLDevice device = out.device();
  SM120_REQUIRE(device.device_type == kDLCUDA, "all tensors must be on a CUDA device");
  for (const TensorView& t : {hidden, topk_ids, topk_weights, w13, w13_scale, w13_alpha, w13_input_scale, w2,
                              w2_scale, w2_alpha, w2_input_scale, workspace}) {
    SM120_REQUIRE(is_on(t, device), "all tensors must be on the device of out");
  }
  const bool bf16 = is_dtype(hidden, kDLBfloat, 16);
  SM120_REQUIRE(hidden.ndim() == 2 && (bf16 || is_dtype(hidden, kDLFloat, 16)),
                "hidden must be bfloat16 or float16 [M, H]");
  const int64_t m = hidden.size(0);
  const int64_t width = hidden.size(1);
  SM120_REQUIRE(width > 0 && width % kBlock == 0 && width <= moe::kMaxHiddenSize,
                "H must be a positive multiple of 16 up to " + std::to_string(moe::kMaxHiddenSize));
  SM120_REQUIRE((width == 1 || hidden.stride(1) == 1) && row_stride(hidden) % 8 == 0 && aligned(hidden, 16),
                "hidden must have adjacent columns and rows that start at multiples of 16 bytes");
  SM120_REQUIRE(
      topk_ids.ndim() == 2 && is_dtype(topk_ids, kDLInt, 32) && is_dense(topk_ids) && topk_ids.size(0) == m,
      "topk_ids must be contiguous int32 [M, top_k]");
  const int64_t top_k = topk_ids.size(1);
  SM120_REQUIRE(top_k > 0 && top_k <= moe::kMaxTopK, "top_k must be 1 to " + std::to_string(moe::kMaxTopK));
  SM120_REQUIRE(m * top_k <= moe::kMaxPairs, "M * top_k must be at most " + std::to_string(moe::kMaxPairs));
  SM120_REQUIRE(topk_weights.ndim() == 2 && is_dtype(topk_weights, kDLFloat, 32) && is_dense(topk_weights) &&
                    topk_weights.size(0) == m && topk_weights.size(1) == top_k,
                "topk_weights must be contiguous float32 [M, top_k]");
  SM120_REQUIRE(w13.ndim() == 3 && w2.ndim() == 3, "w13 and w2 must have the dimensions [experts, N, K / 2]");
  const int64_t experts = w13.size(0);
  SM120_REQUIRE(experts > 0 && experts <= moe::kMaxExperts,
                "there must be 1 to " + std::to_string(moe::kMaxExperts) + " experts");
  SM120_REQUIRE(activation == 0 || activation == 1, "activation must be 0 (silu) or 1 (relu2)");
  const bool gated = activation == 0;
  const int64_t inner = 2 * w2.size(2);
  SM120_REQUIRE(inner > 0 && inner % kBlock == 0 && inner < (int64_t{1} << 22),
                "the intermediate size must be a positive multiple of 16");
  check_stack(w13, w13_scale, w13_alpha, "w13", experts, gated ? 2 * inner : inner, width);
  check_stack(w2, w2_scale, w2_alpha, "w2", experts, width, inner);
  SM120_REQUIRE(first_expert >= 0 && first_expert < (int64_t{1} << 30), "first_expert must not be negative");
  SM120_REQUIRE(out.ndim() == 2 && out.size(0) == m && out.size(1) == width &&
                    out.dtype().code == hidden.dtype().code && out.dtype().bits == 16 && out.stride(1) == 1 &&
                    row_stride(out) % 2 == 0 && aligned(out, 4),
                "out must be [M, H] of the dtype of hidden, with adjacent columns and 4-byte aligned rows");
  SM120_REQUIRE(is_byte(workspace) && is_dense(workspace) && aligned(workspace, 16) &&
                    numel(workspace) >= moe::workspace_bytes(static_cast<int>(m), static_cast<int>(top_k),
                                                             static_cast<int>(inner)),
                "workspace must be 16-byte aligned bytes, as many as nvfp4_moe_workspace says");
  moe::Params p = {};
  p.input_scale_per_expert = is_per_expert(w13_input_scale, "w13", experts);
  p.inner_scale_per_expert = is_per_expert(w2_input_scale, "w2", experts);
  p.hidden = hidden.data_ptr();
  p.topk_ids = static_cast<const int32_t*>(topk_ids.data_ptr());
  p.topk_weights = static_cast<const float*>(topk_weights.data_ptr());
  p.w13 = static_cast<const uint8_t*>(w13.data_ptr());
  p.w13_scales = static_cast<const uint8_t*>(w13_scale.data_ptr());
  p.w13_alpha = static_cast<const float*>(w13_alpha.data_ptr());
  p.input_scale = static_cast<const float*>(w13_input_scale.data_ptr());
  p.w2 = static_cast<const uint8_t*>(w2.data_ptr());
  p.w2_scales = static_cast<const uint8_t*>(w2_scale.data_ptr());
  p.w2_alpha = static_cast<const float*>(w2_alpha.data_ptr());
  p.inner_scale = static_cast<const float*>(w2_input_scale.data_ptr());
  p.out = out.data_ptr();
  p.workspace = static_cast<uint8_t*>(workspace.data_ptr());
  p.hidden_stride = row_stride(hidden);
  p.out_stride = row_stride(out);
  p.m = static_cast<int>(m);
  p.top_k = static_cast<int>(top_k);
  p.hidden_size = static_cast<int>(width);
  p.intermediate = static_cast<int>(inner);
  p.experts = static_cast<int>(experts);
  p.first_expert = static_cast<int>(first_expert);
  p.gate_first = gate_first;
  p.activation = gated ? moe::Activation::kSilu : moe::Activation::kRelu2;
  p.type = bf16 ? moe::OutputType::kBfloat16 : moe::OutputType::kFloat16;
  if (m == 0) return;
  const DeviceGuard guard(device.device_id);
  gemm::Device facts = {};
  check_cuda(gemm::current_device(&facts), "reading the device's properties");
  const cudaError_t error = moe::launch_moe(p, facts, dependent_launch, current_stream(device));
  SM120_REQUIRE(
      error != cudaErrorInvalidValue,
      "M * top_k, H and the number of experts are too much together for shared memory: pass fewer tokens");
  check_cuda(error, "launching the NVFP4 experts");
}

/// Bytes of the workspace of nvfp4_moe.
int64_t nvfp4_moe_workspace(int64_t m, int64_t top_k, int64_t intermediate) {
  return moe::workspace_bytes(static_cast<int>(m), static_cast<int>(top_k), static_cast<int>(intermediate));
}

}  // namespace
}  // namespace sm120

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_moe, sm120::nvfp4_moe);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_moe_workspace, sm120::nvfp4_moe_workspace);
