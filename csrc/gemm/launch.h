// Host entry of the NVFP4 GEMM for any number of tokens: raw pointers, sizes, stream; no framework, no
// allocation, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace sm120::gemm {

/// Facts of the current device.
cudaError_t current_device(Device* device);

/// Launch D = alpha * X W^T + bias on `stream`. `plan` must come from choose_plan, or differ from it only for
/// measurements. `dependent_launch` lets it start before the kernel in front has finished; until then it
/// reads weights and their scales alone.
cudaError_t launch(const Params& params, const Plan& plan, bool dependent_launch, cudaStream_t stream);

}  // namespace sm120::gemm
