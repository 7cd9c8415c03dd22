// Which kernel multiplies how: the only place that knows both. Plain C++.
#pragma once

#include "../gemm_skinny/config.h"
#include "../gemm_tiled/config.h"

namespace sm120::gemm {

/// Up to here a row's result does not depend on what else is in the batch: one kernel, sums in an order that
/// N, K and the device decide.
constexpr int kSkinnyTokens = skinny::kMaxTokens;

/// What the choice depends on besides the problem.
struct Device {
  int sm_count;
  int max_cluster;  // 1 where clusters do not exist
};

struct Plan {
  bool tiled;
  skinny::Config skinny;  // unless tiled
  tiled::Shape shape;     // if tiled
};

constexpr Plan choose_plan(int m, int n, int k, const Device& device) {
  return {m > kSkinnyTokens, skinny::choose_config(m, n, k, device.sm_count, device.max_cluster),
          tiled::choose_shape(m, n, device.sm_count)};
}

}  // namespace sm120::gemm
