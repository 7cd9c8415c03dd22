// Instantiates the skinny kernel and launches it.
#include "kernel.cuh"
#include "launch.h"

namespace sm120::skinny {
namespace {

using Kernel = void (*)(Params);
using QuantizingKernel = void (*)(QuantizingParams);

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

template <quantize::InputType kType>
QuantizingKernel quantizing_kernel_for(int token_tiles) {
  switch (token_tiles) {
    case 1:
      return quantizing_gemm_kernel<kType, 1, kRingStages>;
    case 2:
      return quantizing_gemm_kernel<kType, 2, kRingStages>;
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

template <typename KernelParams>
cudaError_t launch_kernel(void (*kernel)(KernelParams), const KernelParams& params, const Config& config,
                          bool dependent_launch, cudaStream_t stream) {
  if (kernel == nullptr || params.cluster_shift < 0 ||
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
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace

cudaError_t launch_gemm(const gemm::Params& params, const Config& config, bool dependent_launch,
                        cudaStream_t stream) {
  const Params own = {params, shift_of(config.cluster)};
  return launch_kernel(kernel_for(config.token_tiles), own, config, dependent_launch, stream);
}

cudaError_t launch_quantizing_gemm(const gemm::Params& params, quantize::InputType input_type,
                                   const float* encode_scale, const Config& config, bool dependent_launch,
                                   cudaStream_t stream) {
  if (params.m > kMaxQuantizedTokens) return cudaErrorInvalidValue;
  const QuantizingParams own = {{params, shift_of(config.cluster)}, encode_scale};
  const QuantizingKernel kernel =
      input_type == quantize::InputType::kBfloat16
          ? quantizing_kernel_for<quantize::InputType::kBfloat16>(config.token_tiles)
          : quantizing_kernel_for<quantize::InputType::kFloat16>(config.token_tiles);
  return launch_kernel(kernel, own, config, dependent_launch, stream);
}

}  // namespace sm120::skinny
