// Host entry of the quantizer.
#pragma once

#include <cuda_runtime_api.h>

#include "config.h"

namespace sm120::quantize {

/// Quantize on `stream`; `dependent_launch` as for the GEMM (nothing is read before the kernel in front is
/// done). At most kMaxRows rows.
cudaError_t launch_quantize(const Params& params, InputType input_type, Rule rule, bool dependent_launch,
                            cudaStream_t stream);

}  // namespace sm120::quantize
