// Which instantiations a launch takes.
#pragma once

#include "down.cuh"
#include "gate_up.cuh"

namespace sm120::moe {

using Kernel = void (*)(KernelParams);

inline Kernel select_gate_up(const Params& params) {
  const bool aligned = params.hidden_size % 32 == 0;
  if (params.type == OutputType::kBfloat16) {
    return aligned ? gate_up_kernel<InputType::kBfloat16, true> : gate_up_kernel<InputType::kBfloat16, false>;
  }
  return aligned ? gate_up_kernel<InputType::kFloat16, true> : gate_up_kernel<InputType::kFloat16, false>;
}

inline Kernel select_down(const Params& params) {
  return params.intermediate % 32 == 0 ? down_kernel<true> : down_kernel<false>;
}

/// Dynamic shared memory of the gate/up kernel.
constexpr int gate_up_shared_bytes(const Params& params, const Config& config) {
  const int units = units_along(params.hidden_size);
  const int slice = (units + (1 << config.gate_up_shift) - 1) >> config.gate_up_shift;
  return GateUpShared(params, slice, config.gate_up_rows).bytes;
}

}  // namespace sm120::moe
