// Host entry of the tiled GEMM: raw pointers, sizes, stream; no framework, no allocation, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "config.h"

namespace sm120::tiled {

/// Launch D = alpha * X W^T + bias on `stream`. `dependent_launch` lets it start before the kernel in front
/// has finished (kernel.cuh says when).
cudaError_t launch_gemm(const Params& params, Shape shape, bool dependent_launch, cudaStream_t stream);

}  // namespace sm120::tiled
