// Host entry of the mixture-of-experts layer for few tokens: raw pointers, sizes, stream; no framework, no
// allocation, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "../gemm/plan.h"
#include "params.h"

namespace sm120::moe {

constexpr int kMaxTopK = 32;
constexpr int kMaxPairs = 4096;  // m * top_k
/// Every CTA keeps a bit for each expert in shared memory.
constexpr int kMaxExperts = 8192;
/// A CTA keeps whole quantized rows of up to eight tokens in shared memory.
constexpr int kMaxHiddenSize = 12288;

/// Bytes of Params::workspace.
constexpr int64_t workspace_bytes(int m, int top_k, int intermediate) {
  const int64_t code_row = intermediate / 2;
  const int64_t scale_row = (intermediate / 16 + 3) / 4 * 4;
  return int64_t{1} * m * top_k * (code_row + scale_row);
}

/// Launch the layer's two kernels on `stream`: gate/up with the activation, then down, the second always as a
/// dependent launch of the first where the device has those. `dependent_launch` lets the first start before
/// the kernel in front has finished; it reads nothing until then. cudaErrorInvalidValue beyond the limits
/// above.
cudaError_t launch_moe(const Params& params, const gemm::Device& device, bool dependent_launch,
                       cudaStream_t stream);

}  // namespace sm120::moe
