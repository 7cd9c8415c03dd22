#include "kernel.cuh"
#include "launch.h"

namespace sm120::quantize {

cudaError_t launch_quantize(const Params& params, bool dependent_launch, cudaStream_t stream) {
  const int64_t items = work_items(params.m, params.k, params.layout);
  if (items == 0) return cudaSuccess;
  if ((items + kThreads - 1) / kThreads > 0x7FFFFFFF) return cudaErrorInvalidValue;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&launch, quantize_kernel, params);
}

}  // namespace sm120::quantize
