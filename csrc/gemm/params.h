// The problem that every NVFP4 GEMM kernel solves. Plain C++.
#pragma once

#include <cstdint>

namespace sm120::gemm {

enum class OutputType : int { kBfloat16 = 0, kFloat16 = 1 };

/// D[m, n] = alpha[n] * sum_k X[m, k] * W[n, k] + bias[n]. Strides in bytes except out_stride (elements).
struct Params {
  const uint8_t* activations;        // [m, k/2] packed e2m1, rows activation_stride apart (multiple of 8)
  const uint8_t* activation_scales;  // swizzled 128x4, 16-byte aligned
  const uint8_t* weights;            // [n, k/2] packed e2m1, rows weight_stride apart (multiple of 16)
  const uint8_t* weight_scales;      // swizzled 128x4, 16-byte aligned
  const float* alpha;                // one, or one per output column
  const void* bias;                  // n elements of the output type, or null
  void* out;                         // [m, n], rows out_stride apart (multiple of 4)
  int activation_stride;
  int weight_stride;
  int64_t out_stride;
  int m, n, k;
  bool alpha_per_column;
  OutputType output_type;
};

}  // namespace sm120::gemm
