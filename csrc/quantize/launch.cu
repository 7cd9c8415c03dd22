#include "launch.h"
#include "select.cuh"

namespace sm120::quantize {

cudaError_t launch_quantize(const Params& params, InputType input_type, Rule rule, bool dependent_launch,
                            cudaStream_t stream) {
  if (params.m == 0) return cudaSuccess;
  if (params.m > kMaxRows) return cudaErrorInvalidValue;
  const int rows = rows_per_thread(params.m, params.k);
  const Grid grid = grid_for(params.m, params.k, rows);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(grid.columns), static_cast<unsigned>(grid.groups));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&launch, select_kernel(input_type, rule, rows), params);
}

}  // namespace sm120::quantize
