// What every entry of the binding checks of its tensors, and the guard that makes their device current. A
// message names the argument, its value and the remedy; the Python side turns it into the package's own error
// types.
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <string>

namespace sm120::binding {

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

inline void check_cuda(cudaError_t error, const char* what) {
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

inline bool is_dtype(const TensorView& t, int code, int bits) {
  return t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}

inline bool is_byte(const TensorView& t) {
  return is_dtype(t, kDLUInt, 8) || is_dtype(t, kDLFloat8_e4m3fn, 8);
}

inline bool is_dense(const TensorView& t) {
  int64_t expected = 1;
  for (int i = t.ndim() - 1; i >= 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != expected) return false;
    expected *= t.size(i);
  }
  return true;
}

inline int64_t numel(const TensorView& t) {
  int64_t count = 1;
  for (int i = 0; i < t.ndim(); ++i) count *= t.size(i);
  return count;
}

inline bool is_on(const TensorView& t, const DLDevice& device) {
  return t.device().device_type == device.device_type && t.device().device_id == device.device_id;
}

inline bool aligned(const TensorView& t, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0;
}

inline int64_t row_stride(const TensorView& t) {
  return t.size(0) > 1 ? t.stride(0) : t.size(1);
}

/// Bytes of a 128x4 scale buffer for `rows` rows and inner dimension `k`.
inline int64_t scale_bytes(int64_t rows, int64_t k) {
  return (rows + 127) / 128 * ((k + 63) / 64) * 512;
}

inline void check_operand(const TensorView& t, const char* what, int64_t k, int stride_multiple) {
  SM120_REQUIRE(t.ndim() == 2 && is_dtype(t, kDLUInt, 8), std::string(what) + " must be uint8 [rows, K/2]");
  SM120_REQUIRE(t.size(1) == k / 2 && (t.size(1) == 1 || t.stride(1) == 1),
                std::string(what) + " must have K/2 adjacent bytes a row, the same K as the other operand");
  SM120_REQUIRE(
      row_stride(t) % stride_multiple == 0 && aligned(t, stride_multiple),
      std::string(what) + " rows must start at multiples of " + std::to_string(stride_multiple) + " bytes");
}

inline void check_scales(const TensorView& t, const char* what, int64_t rows, int64_t k) {
  SM120_REQUIRE(is_byte(t) && is_dense(t) && numel(t) >= scale_bytes(rows, k) && aligned(t, 16),
                std::string(what) +
                    " must be a contiguous, 16-byte aligned uint8 or float8_e4m3fn buffer in the 128x4 "
                    "order, padded to 128 rows and 4 columns");
}

inline cudaStream_t current_stream(const DLDevice& device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

}  // namespace sm120::binding
