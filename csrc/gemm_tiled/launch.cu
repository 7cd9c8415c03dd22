// Instantiates the tiled kernel and launches it.
#include "kernel.cuh"
#include "launch.h"

namespace sm120::tiled {
namespace {

using Kernel = void (*)(Params);

template <Shape kShape>
Kernel kernel_for(const Params& params) {
  const bool whole_chunks =
      params.activation_stride % 16 == 0 && reinterpret_cast<uintptr_t>(params.activations) % 16 == 0;
  return whole_chunks ? tiled_gemm_kernel<kShape, true> : tiled_gemm_kernel<kShape, false>;
}

}  // namespace

cudaError_t launch_gemm(const Params& params, Shape shape, bool dependent_launch, cudaStream_t stream) {
  if (shape != Shape::kWide && shape != Shape::kSplitK) return cudaErrorInvalidValue;
  if (params.m == 0 || params.n == 0) return cudaSuccess;
  const Kernel kernel =
      shape == Shape::kWide ? kernel_for<Shape::kWide>(params) : kernel_for<Shape::kSplitK>(params);
  // Per device and idempotent, so it is set at each launch: microseconds on the host, nothing inside a graph.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(shape));
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  const Grid tiles = grid(shape, params.m, params.n);
  launch.gridDim = dim3(tiles.width, tiles.rows, tiles.planes);
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = static_cast<size_t>(shared_bytes(shape));
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace sm120::tiled
