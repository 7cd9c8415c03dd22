// Host entry of the mixture-of-experts layer for few tokens: raw pointers, sizes, stream; no framework, no
// allocation, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "../gemm/plan.h"
#include "config.h"

namespace sm120::moe {

/// Launch the layer's two kernels on `stream`: gate/up with the activation, then down, the second always as a
/// dependent launch of the first where the device has those. `dependent_launch` lets the first start before
/// the kernel in front has finished; it reads nothing until then. cudaErrorInvalidValue beyond the limits
/// in config.h; the workspace has workspace_bytes() of it.
cudaError_t launch_moe(const Params& params, const gemm::Device& device, bool dependent_launch,
                       cudaStream_t stream);

}  // namespace sm120::moe
