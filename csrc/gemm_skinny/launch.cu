// Instantiates the skinny kernel and launches it.
#include "kernel.cuh"
#include "launch.h"

namespace sm120::skinny {
namespace {

using Kernel = void (*)(Params);

Kernel kernel_for(int token_tiles) {
  switch (token_tiles) {
    case 1:
      return gemm_kernel<1, kRingStages>;
    case 2:
      return gemm_kernel<2, kRingStages>;
    case 4:
      return gemm_kernel<4, kRingStages>;
    case 8:
      return gemm_kernel<8, kRingStages>;
    default:
      return nullptr;
  }
}

/// log2 of a legal cluster size, or -1.
int shift_of(int cluster) {
  for (int shift = 0; shift <= 3; ++shift) {
    if (cluster == 1 << shift) return shift;
  }
  return -1;
}

}  // namespace

cudaError_t launch_gemm(const gemm::Params& params, const Config& config, bool dependent_launch,
                        cudaStream_t stream) {
  const Kernel kernel = kernel_for(config.token_tiles);
  const Params with_shift = {params, shift_of(config.cluster)};
  if (kernel == nullptr || with_shift.cluster_shift < 0 ||
      (params.m < kMaxTokens ? params.m : kMaxTokens) > 8 * config.token_tiles) {
    return cudaErrorInvalidValue;
  }
  if (params.m == 0 || params.n == 0) return cudaSuccess;
  const int shared = shared_bytes(kRingStages, config.token_tiles);
  // Per device and idempotent, so it is set at each launch: microseconds on the host, nothing inside a graph.
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(row_tiles(params.n) * config.cluster),
                        static_cast<unsigned>(token_blocks(params.m)));
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
  return cudaLaunchKernelEx(&launch, kernel, with_shift);
}

}  // namespace sm120::skinny
