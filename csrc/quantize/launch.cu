#include "kernel.cuh"
#include "launch.h"

namespace sm120::quantize {
namespace {

using Kernel = void (*)(Params);

template <InputType kType>
Kernel pick(Rule rule, int rows) {
  if (rule == Rule::kExact) return quantize_kernel<kType, Rule::kExact, 1>;
  return rows == 4 ? quantize_kernel<kType, Rule::kReciprocal, 4>
                   : quantize_kernel<kType, Rule::kReciprocal, 1>;
}

}  // namespace

cudaError_t launch_quantize(const Params& params, InputType input_type, Rule rule, bool dependent_launch,
                            cudaStream_t stream) {
  if (params.m == 0) return cudaSuccess;
  const int rows = rule == Rule::kExact ? 1 : rows_per_thread(params.m, params.k);
  const Grid grid = grid_for(params.m, params.k, rows);
  if (grid.groups > 0xFFFF) return cudaErrorInvalidValue;
  const Kernel kernel = input_type == InputType::kBfloat16 ? pick<InputType::kBfloat16>(rule, rows)
                                                           : pick<InputType::kFloat16>(rule, rows);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(grid.columns), static_cast<unsigned>(grid.groups));
  launch.blockDim = dim3(kThreads);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace sm120::quantize
