// Instantiates the skinny kernel and launches it.
#include "kernel.cuh"
#include "launch.h"

namespace sm120::skinny {
namespace {

using Kernel = void (*)(Params);

template <int kStages>
Kernel kernel_for(int token_tiles) {
  switch (token_tiles) {
    case 1:
      return gemm_kernel<1, kStages>;
    case 2:
      return gemm_kernel<2, kStages>;
    case 4:
      return gemm_kernel<4, kStages>;
    case 8:
      return gemm_kernel<8, kStages>;
    default:
      return nullptr;
  }
}

Kernel kernel_for(const Config& config) {
  switch (config.stages) {
    case 2:
      return kernel_for<2>(config.token_tiles);
    case 4:
      return kernel_for<4>(config.token_tiles);
    default:
      return nullptr;
  }
}

bool legal_cluster(int cluster) {
  return cluster == 1 || cluster == 2 || cluster == 4 || cluster == 8;
}

}  // namespace

cudaError_t current_device(Device* device) {
  int index = 0;
  int clusters = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->sm_count, cudaDevAttrMultiProcessorCount, index);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, index);
  device->max_cluster = clusters ? kMaxCluster : 1;
  return error;
}

cudaError_t launch_gemm(const Params& params, const Config& config, bool dependent_launch,
                        cudaStream_t stream) {
  const Kernel kernel = kernel_for(config);
  if (kernel == nullptr || !legal_cluster(config.cluster) || params.m > 8 * config.token_tiles) {
    return cudaErrorInvalidValue;
  }
  if (params.m == 0 || params.n == 0) return cudaSuccess;
  const int shared = shared_bytes(config.stages, config.token_tiles);
  // Per device and idempotent, so it is set at each launch: microseconds on the host, nothing inside a graph.
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(row_tiles(params.n) * config.cluster));
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = static_cast<size_t>(shared);
  launch.stream = stream;
  launch.attrs = attributes;
  if (config.cluster > 1) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[launch.numAttrs].val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
    ++launch.numAttrs;
  }
  if (dependent_launch) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[launch.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++launch.numAttrs;
  }
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace sm120::skinny
