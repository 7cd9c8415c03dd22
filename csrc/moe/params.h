// The problem that the mixture-of-experts kernels solve. Plain C++.
#pragma once

#include <cstdint>

#include "../gemm/params.h"

namespace sm120::moe {

using gemm::OutputType;

enum class Activation : int {
  kSilu = 0,   // silu(gate) * up, w13 has 2 * intermediate rows an expert
  kRelu2 = 1,  // max(x, 0)^2, no gate: intermediate rows
};

/// For every token t the sum over its slots s of topk_weights[t, s] * expert(topk_ids[t, s])(hidden[t]), with
/// expert(x) = w2_alpha * W2 q(act(w13_alpha * W13 q(x))) and q the quantization to NVFP4. Ids outside
/// [first_expert, first_expert + experts) are skipped; a token without any expert here gets zeros.
///
/// Scale buffers: per expert one 128x4 swizzle, rows padded to 128 and blocks to 4, experts right behind each
/// other. Every encode scale is one number for all experts, or [experts] if its flag says so.
struct Params {
  const void* hidden;         // [m, hidden_size] 16-bit, rows hidden_stride elements apart (multiple of 8),
                              // 16-byte aligned
  const int32_t* topk_ids;    // [m, top_k]
  const float* topk_weights;  // [m, top_k]
  const uint8_t* w13;         // [experts, rows, hidden_size / 2] packed e2m1, 16-byte aligned
  const uint8_t* w13_scales;  // e4m3 bytes, 16-byte aligned
  const float* w13_alpha;     // [experts]
  const float* input_scale;   // encode scale of hidden
  const uint8_t* w2;          // [experts, hidden_size, intermediate / 2] packed e2m1, 16-byte aligned
  const uint8_t* w2_scales;   // e4m3 bytes, 16-byte aligned
  const float* w2_alpha;      // [experts]
  const float* inner_scale;   // encode scale of the activation's output
  void* out;                  // [m, hidden_size] of hidden's type, rows out_stride elements apart (even)
  uint8_t* workspace;         // workspace_bytes(m, top_k, intermediate), 16-byte aligned, any content
  int64_t hidden_stride;
  int64_t out_stride;
  int m, top_k, hidden_size, intermediate;  // both sizes are multiples of 16
  int experts, first_expert;
  bool input_scale_per_expert;
  bool inner_scale_per_expert;
  bool gate_first;  // w13's first half is the gate (kSilu only); SGLang's flashinfer_cutlass order is not
  Activation activation;
  OutputType type;  // of hidden and out
};

}  // namespace sm120::moe
