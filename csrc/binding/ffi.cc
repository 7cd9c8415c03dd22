// The dense entries of the library: check tensors, find the stream, call a launcher. Only this folder knows
// apache-tvm-ffi.
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <string>

#include "../gemm/launch.h"
#include "../gemm_skinny/launch.h"
#include "../quantize/launch.h"
#include "checks.h"

namespace sm120 {
namespace {

using namespace binding;

void check_k(int64_t k) {
  SM120_REQUIRE(k > 0 && k % kBlock == 0 && k < (int64_t{1} << 30), "K must be a positive multiple of 16");
}

/// 16-bit activations x [M, K].
void check_numbers(const TensorView& x) {
  SM120_REQUIRE(x.ndim() == 2 && (is_dtype(x, kDLBfloat, 16) || is_dtype(x, kDLFloat, 16)),
                "x must be bfloat16 or float16 [M, K]");
  check_k(x.size(1));
  SM120_REQUIRE(x.stride(1) == 1 && row_stride(x) % 8 == 0 && aligned(x, 16),
                "x must have adjacent columns and rows that start at multiples of 16 bytes");
}

void check_encode_scale(const TensorView& t) {
  SM120_REQUIRE(is_dtype(t, kDLFloat, 32) && numel(t) == 1, "global_scale must be one float32");
}

quantize::InputType input_type(const TensorView& x) {
  return is_dtype(x, kDLBfloat, 16) ? quantize::InputType::kBfloat16 : quantize::InputType::kFloat16;
}

/// All of a problem but its activations.
gemm::Params weight_params(int64_t m, int64_t k, const TensorView& b, const TensorView& b_scale,
                           const TensorView& alpha, const Optional<TensorView>& bias, const TensorView& out) {
  check_k(k);
  check_operand(b, "b", k, 16);
  const int64_t n = b.size(0);
  SM120_REQUIRE(row_stride(b) < kMaxRowStride, "rows of b must be less than 32 MiB apart");
  SM120_REQUIRE(m < (int64_t{1} << 22), "M must be below four million");
  SM120_REQUIRE(n % 8 == 0 && n < (int64_t{1} << 22), "N must be a multiple of 8 below four million");
  check_scales(b_scale, "b_scale", n, k);
  const bool bf16 = is_dtype(out, kDLBfloat, 16);
  SM120_REQUIRE(bf16 || is_dtype(out, kDLFloat, 16), "out must be bfloat16 or float16");
  SM120_REQUIRE(out.ndim() == 2 && out.size(0) == m && out.size(1) == n && (n <= 1 || out.stride(1) == 1) &&
                    row_stride(out) % 4 == 0 && aligned(out, 8),
                "out must be [M, N] with adjacent columns and rows that start at multiples of 8 bytes");
  SM120_REQUIRE(is_dtype(alpha, kDLFloat, 32) && is_dense(alpha) && (numel(alpha) == 1 || numel(alpha) == n),
                "alpha must be float32, one value or N contiguous ones");
  gemm::Params p = {};
  if (bias.has_value()) {
    const TensorView& values = bias.value();
    SM120_REQUIRE(values.dtype().code == out.dtype().code && values.dtype().bits == 16 && is_dense(values) &&
                      numel(values) == n && aligned(values, 4),
                  "bias must be N contiguous values of out's dtype, 4-byte aligned");
    p.bias = values.data_ptr();
  }
  p.weights = static_cast<const uint8_t*>(b.data_ptr());
  p.weight_scales = static_cast<const uint8_t*>(b_scale.data_ptr());
  p.alpha = static_cast<const float*>(alpha.data_ptr());
  p.out = out.data_ptr();
  p.weight_stride = static_cast<int>(row_stride(b));
  p.out_stride = row_stride(out);
  p.m = static_cast<int>(m);
  p.n = static_cast<int>(n);
  p.k = static_cast<int>(k);
  p.alpha_per_column = numel(alpha) == n && n > 1;
  p.output_type = bf16 ? gemm::OutputType::kBfloat16 : gemm::OutputType::kFloat16;
  return p;
}

gemm::Params make_params(const TensorView& a, const TensorView& a_scale, const TensorView& b,
                         const TensorView& b_scale, const TensorView& alpha, const Optional<TensorView>& bias,
                         const TensorView& out) {
  const int64_t k = a.ndim() == 2 ? 2 * a.size(1) : 0;
  check_k(k);
  check_operand(a, "a", k, 8);
  SM120_REQUIRE(row_stride(a) < kMaxRowStride, "rows of a must be less than 32 MiB apart");
  check_scales(a_scale, "a_scale", a.size(0), k);
  gemm::Params p = weight_params(a.size(0), k, b, b_scale, alpha, bias, out);
  p.activations = static_cast<const uint8_t*>(a.data_ptr());
  p.activation_scales = static_cast<const uint8_t*>(a_scale.data_ptr());
  p.activation_stride = static_cast<int>(row_stride(a));
  return p;
}

void check_devices(const DLDevice& device, std::initializer_list<TensorView> operands,
                   const Optional<TensorView>& bias) {
  SM120_REQUIRE(device.device_type == kDLCUDA, "all tensors must be on a CUDA device");
  bool together = !bias.has_value() || is_on(bias.value(), device);
  for (const TensorView& t : operands) together = together && is_on(t, device);
  SM120_REQUIRE(together, "all tensors, bias among them, must be on the device of out");
}

gemm::Device current_device() {
  gemm::Device facts = {};
  check_cuda(gemm::current_device(&facts), "reading the device's properties");
  return facts;
}

gemm::Plan plan_of(int64_t m, int64_t n, int64_t k) {
  return gemm::choose_plan(static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), current_device());
}

/// out = alpha * a @ b.T + bias for any number of rows of a. `forced` is for measurements and 0 elsewhere: 1,
/// 2, 4, 8 take the kernel for few tokens with that cluster, 64 and 128 the tiled one with that tile.
void nvfp4_gemm(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale, TensorView alpha,
                Optional<TensorView> bias, TensorView out, bool dependent_launch, int64_t forced) {
  const DLDevice device = out.device();
  check_devices(device, {a, a_scale, b, b_scale, alpha}, bias);
  const gemm::Params params = make_params(a, a_scale, b, b_scale, alpha, bias, out);
  const DeviceGuard guard(device.device_id);
  gemm::Plan plan = plan_of(params.m, params.n, params.k);
  if (forced > 0) {
    plan.tiled = forced > skinny::kMaxCluster;
    plan.shape = static_cast<tiled::Shape>(forced);
    plan.skinny.cluster = static_cast<int>(forced);
  }
  const auto stream = current_stream(device);
  check_cuda(gemm::launch(params, plan, dependent_launch, stream), "launching the NVFP4 GEMM");
}

/// The same for 16-bit activations x of at most 16 rows, quantized inside the kernel: the bits of
/// nvfp4_quantize (fast rule) and nvfp4_gemm in one launch. `forced`: the cluster, 0 for the kernel's own
/// choice.
void nvfp4_linear(TensorView x, TensorView global_scale, TensorView b, TensorView b_scale, TensorView alpha,
                  Optional<TensorView> bias, TensorView out, bool dependent_launch, int64_t forced) {
  const DLDevice device = out.device();
  check_devices(device, {x, global_scale, b, b_scale, alpha}, bias);
  check_numbers(x);
  check_encode_scale(global_scale);
  SM120_REQUIRE(x.size(0) <= skinny::kMaxQuantizedTokens,
                "M must be at most " + std::to_string(skinny::kMaxQuantizedTokens));
  SM120_REQUIRE(2 * row_stride(x) < kMaxRowStride, "rows of x must be less than 32 MiB apart");
  gemm::Params params = weight_params(x.size(0), x.size(1), b, b_scale, alpha, bias, out);
  params.activations = static_cast<const uint8_t*>(x.data_ptr());
  params.activation_stride = static_cast<int>(2 * row_stride(x));
  const DeviceGuard guard(device.device_id);
  skinny::Config config = plan_of(params.m, params.n, params.k).skinny;
  if (forced > 0) config.cluster = static_cast<int>(forced);
  const auto stream = current_stream(device);
  check_cuda(skinny::launch_quantizing_gemm(params, input_type(x),
                                            static_cast<const float*>(global_scale.data_ptr()), config,
                                            dependent_launch, stream),
             "launching the NVFP4 GEMM that quantizes");
}

/// Whether nvfp4_linear is the choice on a device, rather than nvfp4_quantize and nvfp4_gemm.
bool nvfp4_quantizes_inside(int64_t device, int64_t m, int64_t n, int64_t k) {
  const DeviceGuard guard(static_cast<int>(device));
  return gemm::quantizes_inside(static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                                current_device());
}

/// The kernel that a call on the current device would use, in words.
String nvfp4_gemm_plan(int64_t m, int64_t n, int64_t k) {
  const gemm::Plan plan = plan_of(m, n, k);
  if (plan.tiled) return "tile " + std::to_string(static_cast<int>(plan.shape));
  return "cluster " + std::to_string(plan.skinny.cluster) + ", token tiles " +
         std::to_string(plan.skinny.token_tiles);
}

/// x [M, K] -> codes [M, K/2] and block scales, swizzled (padding written) or linear. `exact` takes the slow
/// rule that is bit-equal to the reference.
void nvfp4_quantize(TensorView x, TensorView global_scale, TensorView codes, TensorView scales, bool swizzled,
                    bool exact, bool dependent_launch) {
  const DLDevice device = x.device();
  SM120_REQUIRE(device.device_type == kDLCUDA, "x must be on a CUDA device");
  for (const TensorView& t : {global_scale, codes, scales}) {
    SM120_REQUIRE(is_on(t, device), "all tensors must be on the device of x");
  }
  check_numbers(x);
  const int64_t m = x.size(0);
  const int64_t k = x.size(1);
  SM120_REQUIRE(m <= quantize::kMaxRows, "M must be at most " + std::to_string(quantize::kMaxRows));
  check_encode_scale(global_scale);
  SM120_REQUIRE(
      is_dtype(codes, kDLUInt, 8) && is_dense(codes) && numel(codes) == m * k / 2 && aligned(codes, 8),
      "codes must be contiguous uint8 [M, K/2]");
  const int64_t bytes = swizzled ? scale_bytes(m, k) : m * k / kBlock;
  SM120_REQUIRE(is_byte(scales) && is_dense(scales) && numel(scales) == bytes && aligned(scales, 4),
                "scales must be contiguous bytes of the padded (swizzled) or exact (linear) size");
  quantize::Params p = {};
  p.x = x.data_ptr();
  p.global_scale = static_cast<const float*>(global_scale.data_ptr());
  p.codes = static_cast<uint8_t*>(codes.data_ptr());
  p.scales = static_cast<uint8_t*>(scales.data_ptr());
  p.x_stride = row_stride(x);
  p.m = static_cast<int>(m);
  p.k = static_cast<int>(k);
  p.layout = swizzled ? quantize::Layout::kSwizzled : quantize::Layout::kLinear;
  const auto rule = exact ? quantize::Rule::kExact : quantize::Rule::kReciprocal;
  const DeviceGuard guard(device.device_id);
  const auto stream = current_stream(device);
  check_cuda(quantize::launch_quantize(p, input_type(x), rule, dependent_launch, stream),
             "launching the NVFP4 quantizer");
}

}  // namespace
}  // namespace sm120

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_gemm, sm120::nvfp4_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_gemm_plan, sm120::nvfp4_gemm_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_linear, sm120::nvfp4_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_quantizes_inside, sm120::nvfp4_quantizes_inside);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_quantize, sm120::nvfp4_quantize);
