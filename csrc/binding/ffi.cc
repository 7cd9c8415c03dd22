// The only file that knows apache-tvm-ffi: checks tensors, finds the stream, calls a launcher. A message
// names the argument, its value and the remedy; the Python side turns it into the package's own error types.
#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <string>

#include "../gemm/launch.h"
#include "../quantize/launch.h"

namespace sm120 {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::String;
using tvm::ffi::TensorView;

#define SM120_REQUIRE(condition, remedy)                     \
  do {                                                       \
    if (!(condition)) TVM_FFI_THROW(ValueError) << (remedy); \
  } while (0)

constexpr int kBlock = 16;  // elements of K that share a scale
/// 128 rows, the most that a kernel addresses from one pointer, stay within 32 bits.
constexpr int64_t kMaxRowStride = int64_t{1} << 25;

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // leave no sticky-looking error behind for the next caller
  TVM_FFI_THROW(RuntimeError) << what << " failed: " << cudaGetErrorName(error) << ", "
                              << cudaGetErrorString(error);
}

/// Makes the tensors' device current for one call.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

bool is_dtype(const TensorView& t, int code, int bits) {
  return t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}

bool is_byte(const TensorView& t) {
  return is_dtype(t, kDLUInt, 8) || is_dtype(t, kDLFloat8_e4m3fn, 8);
}

bool is_dense(const TensorView& t) {
  int64_t expected = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != expected) return false;
    expected *= t.size(i);
  }
  return true;
}

int64_t numel(const TensorView& t) {
  int64_t count = 1;
  for (int i = 0; i < t.ndim(); ++i) count *= t.size(i);
  return count;
}

bool is_on(const TensorView& t, const DLDevice& device) {
  return t.device().device_type == device.device_type && t.device().device_id == device.device_id;
}

bool aligned(const TensorView& t, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0;
}

int64_t row_stride(const TensorView& t) {
  return t.size(0) > 1 ? t.stride(0) : t.size(1);
}

/// Bytes of a 128x4 scale buffer for `rows` rows and inner dimension `k`.
int64_t scale_bytes(int64_t rows, int64_t k) {
  return (rows + 127) / 128 * ((k + 63) / 64) * 512;
}

void check_operand(const TensorView& t, const char* what, int64_t k, int stride_multiple) {
  SM120_REQUIRE(t.ndim() == 2 && is_dtype(t, kDLUInt, 8), std::string(what) + " must be uint8 [rows, K/2]");
  SM120_REQUIRE(t.size(1) == k / 2 && (t.size(1) == 1 || t.stride(1) == 1),
                std::string(what) + " must have K/2 adjacent bytes a row, the same K as the other operand");
  SM120_REQUIRE(
      row_stride(t) % stride_multiple == 0 && aligned(t, stride_multiple),
      std::string(what) + " rows must start at multiples of " + std::to_string(stride_multiple) + " bytes");
}

void check_scales(const TensorView& t, const char* what, int64_t rows, int64_t k) {
  SM120_REQUIRE(is_byte(t) && is_dense(t) && numel(t) >= scale_bytes(rows, k) && aligned(t, 16),
                std::string(what) +
                    " must be a contiguous, 16-byte aligned uint8 or float8_e4m3fn buffer in the 128x4 "
                    "order, padded to 128 rows and 4 columns");
}

gemm::Params make_params(const TensorView& a, const TensorView& a_scale, const TensorView& b,
                         const TensorView& b_scale, const TensorView& alpha, const Optional<TensorView>& bias,
                         const TensorView& out) {
  const int64_t k = a.ndim() == 2 ? 2 * a.size(1) : 0;
  SM120_REQUIRE(k > 0 && k % kBlock == 0 && k < (int64_t{1} << 30), "K must be a positive multiple of 16");
  check_operand(a, "a", k, 8);
  check_operand(b, "b", k, 16);
  const int64_t m = a.size(0);
  const int64_t n = b.size(0);
  SM120_REQUIRE(row_stride(a) < kMaxRowStride && row_stride(b) < kMaxRowStride,
                "rows of a and b must be less than 32 MiB apart");
  SM120_REQUIRE(m < (int64_t{1} << 22), "M must be below four million");
  SM120_REQUIRE(n % 8 == 0 && n < (int64_t{1} << 22), "N must be a multiple of 8 below four million");
  check_scales(a_scale, "a_scale", m, k);
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
  p.activations = static_cast<const uint8_t*>(a.data_ptr());
  p.activation_scales = static_cast<const uint8_t*>(a_scale.data_ptr());
  p.weights = static_cast<const uint8_t*>(b.data_ptr());
  p.weight_scales = static_cast<const uint8_t*>(b_scale.data_ptr());
  p.alpha = static_cast<const float*>(alpha.data_ptr());
  p.out = out.data_ptr();
  p.activation_stride = static_cast<int>(row_stride(a));
  p.weight_stride = static_cast<int>(row_stride(b));
  p.out_stride = row_stride(out);
  p.m = static_cast<int>(m);
  p.n = static_cast<int>(n);
  p.k = static_cast<int>(k);
  p.alpha_per_column = numel(alpha) == n && n > 1;
  p.output_type = bf16 ? gemm::OutputType::kBfloat16 : gemm::OutputType::kFloat16;
  return p;
}

gemm::Plan plan_of(int64_t m, int64_t n, int64_t k) {
  gemm::Device facts = {};
  check_cuda(gemm::current_device(&facts), "reading the device's properties");
  return gemm::choose_plan(static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), facts);
}

/// out = alpha * a @ b.T + bias for any number of rows of a. `forced` is for measurements and 0 elsewhere: 1,
/// 2, 4, 8 take the kernel for few tokens with that cluster, 64 and 128 the tiled one with that tile.
void nvfp4_gemm(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale, TensorView alpha,
                Optional<TensorView> bias, TensorView out, bool dependent_launch, int64_t forced) {
  const DLDevice device = out.device();
  SM120_REQUIRE(device.device_type == kDLCUDA, "all tensors must be on a CUDA device");
  bool together = !bias.has_value() || is_on(bias.value(), device);
  for (const TensorView& t : {a, a_scale, b, b_scale, alpha}) together = together && is_on(t, device);
  SM120_REQUIRE(together, "all tensors, bias among them, must be on the device of out");
  const gemm::Params params = make_params(a, a_scale, b, b_scale, alpha, bias, out);
  const DeviceGuard guard(device.device_id);
  gemm::Plan plan = plan_of(params.m, params.n, params.k);
  if (forced > 0) {
    plan.tiled = forced > skinny::kMaxCluster;
    plan.shape = static_cast<tiled::Shape>(forced);
    plan.skinny.cluster = static_cast<int>(forced);
  }
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  check_cuda(gemm::launch(params, plan, dependent_launch, stream), "launching the NVFP4 GEMM");
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
  const bool bf16 = is_dtype(x, kDLBfloat, 16);
  SM120_REQUIRE(x.ndim() == 2 && (bf16 || is_dtype(x, kDLFloat, 16)), "x must be bfloat16 or float16 [M, K]");
  const int64_t m = x.size(0);
  const int64_t k = x.size(1);
  SM120_REQUIRE(k > 0 && k % kBlock == 0 && k < (int64_t{1} << 30), "K must be a positive multiple of 16");
  SM120_REQUIRE(m <= quantize::kMaxRows, "M must be at most " + std::to_string(quantize::kMaxRows));
  SM120_REQUIRE(x.stride(1) == 1 && row_stride(x) % 8 == 0 && aligned(x, 16),
                "x must have adjacent columns and rows that start at multiples of 16 bytes");
  SM120_REQUIRE(is_dtype(global_scale, kDLFloat, 32) && numel(global_scale) == 1,
                "global_scale must be one float32");
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
  const auto input_type = bf16 ? quantize::InputType::kBfloat16 : quantize::InputType::kFloat16;
  const auto rule = exact ? quantize::Rule::kExact : quantize::Rule::kReciprocal;
  const DeviceGuard guard(device.device_id);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  check_cuda(quantize::launch_quantize(p, input_type, rule, dependent_launch, stream),
             "launching the NVFP4 quantizer");
}

}  // namespace
}  // namespace sm120

TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_gemm, sm120::nvfp4_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_gemm_plan, sm120::nvfp4_gemm_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nvfp4_quantize, sm120::nvfp4_quantize);
