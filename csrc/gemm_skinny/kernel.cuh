// NVFP4 GEMM for up to 64 tokens. Weights are the 16-row operand of the mma, tokens the 8-column one
// ("swap-AB"), so one to eight tokens cost one mma column and no padded rows.
//
// What bounds it: the weight bytes, N * K * 0.5625, and the time until the first of them arrive. So the
// kernel is arranged to have the first units of every warp in flight before anything else happens, on as many
// SMs as possible: narrow row tiles (32), K split over the 8 warps of a CTA and, for small N, over a cluster
// of CTAs.
//
// Launch: grid = row_tiles(n) * cluster, kThreads threads, shared_bytes() of dynamic shared memory. With
// programmatic dependent launch the weights must not be written by the kernel directly in front (they are
// constant while serving).
#pragma once

#include "../ptx/grid_dependency.cuh"
#include "reduce.cuh"

namespace sm120::skinny {

template <int kTokenTiles, int kStages>
KERNEL_FN void __launch_bounds__(kThreads) gemm_kernel(const GRID_CONSTANT Params params) {
  const int thread = ptx::thread_index();
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int cluster = static_cast<int>(ptx::cluster_size());
  const int tile = ptx::block_index() / cluster;
  if (cluster > 1) ptx::cluster_arrive();  // answered in reduce_and_store, long after every peer has started

  const uint32_t rings = ptx::dynamic_shared_base();
  const uint32_t ring = rings + warp * kStages * kUnitBytes;
  const uint32_t inbox = rings + kWarps * kStages * kUnitBytes;
  const UnitRange range = units_of_warp(params.k, static_cast<int>(ptx::cluster_rank()), cluster, warp);

  const WeightStream weights(params, tile, lane);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < range.count) weights.load(ring + stage * kUnitBytes, range.first + stage * kWarps);
    ptx::cp_async_commit();
  }
  ptx::launch_dependents();  // the next GEMM may now put its own first weights in flight
  ptx::wait_for_dependencies();

  const Epilogue epilogue(params, tile, thread);
  const TokenStream<kTokenTiles> tokens(params, lane);
  Accumulators<kTokenTiles> sums = {};
  multiply_slice<kTokenTiles, kStages>(sums, ring, weights, tokens, range, params.k, lane);
  reduce_and_store<kTokenTiles, kStages>(sums, epilogue, rings, inbox, params.m);
}

}  // namespace sm120::skinny
