// Reads the device's facts and hands a problem to the kernel that the plan names.
#include "launch.h"

#include "../gemm_skinny/launch.h"
#include "../gemm_tiled/launch.h"

namespace sm120::gemm {

cudaError_t current_device(Device* device) {
  int index = 0;
  int clusters = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->sm_count, cudaDevAttrMultiProcessorCount, index);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, index);
  device->max_cluster = clusters ? skinny::kMaxCluster : 1;
  return error;
}

cudaError_t launch(const Params& params, const Plan& plan, bool dependent_launch, cudaStream_t stream) {
  return plan.tiled ? tiled::launch_gemm(params, plan.shape, dependent_launch, stream)
                    : skinny::launch_gemm(params, plan.skinny, dependent_launch, stream);
}

}  // namespace sm120::gemm
