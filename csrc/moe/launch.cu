// Instantiates the two kernels and launches them.
#include "launch.h"
#include "select.cuh"

namespace sm120::moe {
namespace {

cudaError_t launch_kernel(Kernel kernel, const KernelParams& params, dim3 grid, int shift, int shared,
                          bool dependent, cudaStream_t stream) {
  // Per device, so it is set at each launch: microseconds on the host, nothing inside a graph. Always to the
  // same value: gate/up needs more for some problems than for others, and a smaller one must not take it away
  // from a launch of another thread, or from a graph that is not instantiated yet.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t launch = {};
  launch.gridDim = grid;
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = static_cast<size_t>(shared);
  launch.stream = stream;
  launch.attrs = attributes;
  if (shift > 0) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[launch.numAttrs].val.clusterDim = {1u << shift, 1, 1};
    ++launch.numAttrs;
  }
  if (dependent) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[launch.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++launch.numAttrs;
  }
  return cudaLaunchKernelEx(&launch, kernel, params);
}

bool within_limits(const Params& p) {
  return p.m >= 0 && p.top_k >= 0 && p.top_k <= kMaxTopK && int64_t{1} * p.m * p.top_k <= kMaxPairs &&
         p.experts >= 0 && p.experts <= kMaxExperts && p.hidden_size >= kBlock &&
         p.hidden_size <= kMaxHiddenSize && p.hidden_size % kBlock == 0 && p.intermediate >= kBlock &&
         p.intermediate % kBlock == 0;
}

}  // namespace

cudaError_t launch_moe(const Params& params, const gemm::Device& device, bool dependent_launch,
                       cudaStream_t stream) {
  if (!within_limits(params)) return cudaErrorInvalidValue;
  if (params.m == 0) return cudaSuccess;
  const KernelParams own = {params, choose_config(params, device.sm_count, device.max_cluster)};
  const int shared = gate_up_shared_bytes(params, own.config);
  const auto grid = [](int x, int shift, int y) {
    return dim3(static_cast<unsigned>(x) << shift, static_cast<unsigned>(y));
  };
  const bool any_expert = active_experts(params) > 0;
  if (any_expert) {
    const cudaError_t error = launch_kernel(select_gate_up(params), own,
                                            grid(own.config.gate_up_clusters, own.config.gate_up_shift, 1),
                                            own.config.gate_up_shift, shared, dependent_launch, stream);
    if (error != cudaSuccess) return error;
  }
  // The kernel in front is gate/up, unless there is no expert: then whatever is in front is unknown.
  const bool chained = any_expert && device.max_cluster > 1;
  return launch_kernel(
      select_down(params), own,
      grid(token_blocks(params.m), own.config.down_shift, skinny::row_tiles(params.hidden_size)),
      own.config.down_shift, kDownSharedBytes, chained, stream);
}

}  // namespace sm120::moe
