// Host entries of the skinny GEMM: raw pointers, sizes, stream; no framework, no allocation, no
// synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "../quantize/config.h"
#include "config.h"

namespace sm120::skinny {

/// Launch D = alpha * X W^T + bias on `stream`. `config` must come from choose_config, or differ from it only
/// for measurements. `dependent_launch` lets it start before the kernel in front has finished (kernel.cuh
/// says when).
cudaError_t launch_gemm(const gemm::Params& params, const Config& config, bool dependent_launch,
                        cudaStream_t stream);

/// The same for at most kMaxQuantizedTokens rows of 16-bit activations, which the kernel quantizes for the
/// encode scale itself: the bits of launch_quantize (reciprocal rule) and launch_gemm. `params` as in
/// QuantizingParams.
cudaError_t launch_quantizing_gemm(const gemm::Params& params, quantize::InputType input_type,
                                   const float* encode_scale, const Config& config, bool dependent_launch,
                                   cudaStream_t stream);

}  // namespace sm120::skinny
