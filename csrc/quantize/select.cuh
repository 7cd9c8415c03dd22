// Which instantiation of the kernel a launch takes.
#pragma once

#include "kernel.cuh"

namespace sm120::quantize {

using Kernel = void (*)(Params);

template <InputType kType, Rule kRule>
Kernel select_kernel(int rows) {
  return rows == 4 ? quantize_kernel<kType, kRule, 4> : quantize_kernel<kType, kRule, 1>;
}

template <InputType kType>
Kernel select_kernel(Rule rule, int rows) {
  return rule == Rule::kExact ? select_kernel<kType, Rule::kExact>(rows)
                              : select_kernel<kType, Rule::kReciprocal>(rows);
}

/// `rows` is 1 or 4, see rows_per_thread.
inline Kernel select_kernel(InputType type, Rule rule, int rows) {
  return type == InputType::kBfloat16 ? select_kernel<InputType::kBfloat16>(rule, rows)
                                      : select_kernel<InputType::kFloat16>(rule, rows);
}

}  // namespace sm120::quantize
