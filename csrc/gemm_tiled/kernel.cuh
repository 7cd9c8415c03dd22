// NVFP4 GEMM for more than 64 tokens: output tiles of 128 x 128 or 64 x 64, tokens as the 16-row operand of
// the mma and columns as the 8-column one, 64 x 64 sums in the registers of each of four warps.
//
// What bounds it: the rate of the multiply, once an operand in registers is used often enough; with few
// tiles, the latency of memory. shape kWide and shape kSplitK (config.h) are for these two.
//
// The order of the sums depends on the shape alone: k64 steps in order, and with kSplitK four partial sums in
// the order of the warps. There are no atomics.
//
// Launch: grid() CTAs of kThreads threads, shared_bytes() of dynamic shared memory. With programmatic
// dependent launch the weights must not be written by the kernel directly in front (they are constant while
// serving).
#pragma once

#include "../ptx/grid_dependency.cuh"
#include "epilogue.cuh"
#include "operand.cuh"

namespace sm120::tiled {

/// Warps that share a ring meet: their copies have landed, and the stage they will overwrite has been read.
template <Shape kShape>
DEVICE_FN void sync_group() {
  if constexpr (slices(kShape) == 1) {
    ptx::sync_block();
  } else {
    ptx::sync_warp();
  }
}

template <Shape kShape, bool kWholeChunks>
KERNEL_FN void __launch_bounds__(kThreads, kShape == Shape::kWide ? 2 : 1)
    tiled_gemm_kernel(const GRID_CONSTANT Params params) {
  constexpr int kStrips = strips(kShape);
  constexpr int kSlices = slices(kShape);
  constexpr int kUnitBlocks = kUnitK / kScaleBlock;
  constexpr uint32_t kOperandBytes = kStrips * kStripBytes;
  static_assert(kRingStages == 2, "one stage is computed on while the other is filled");

  const int warp = ptx::warp_index();
  const int thread = ptx::thread_index();
  const int lane = thread % 32;
  const int slice = kSlices == 1 ? 0 : warp;
  const int strip_m = kSlices == 1 ? warp % kStrips : 0;  // of the warp, inside the CTA's tile
  const int strip_n = kSlices == 1 ? warp / kStrips : 0;
  const int first_m = (ptx::block_index_z() * ptx::grid_width() + ptx::block_index()) * kStrips;
  const int first_n = ptx::block_index_y() * kStrips;

  const uint32_t shared = ptx::dynamic_shared_base();
  const uint32_t ring = shared + slice * ring_bytes(kShape);
  const int units = units_along_k(params.k);
  int turns = (units - slice + kSlices - 1) / kSlices;  // this group's units: slice, slice + kSlices, ...
  // The second strip of a 128-row block may have no row at all.
  if (first_row(first_m) >= params.m || first_row(first_n) >= params.n) turns = 0;

  using Stream = OperandStream<kStrips, kThreads / kSlices, kSlices>;
  const int group_thread = thread % (kThreads / kSlices);
  Stream weights(params.weights, params.weight_stride, params.weight_scales, params.n, first_n, params.k,
                 slice, group_thread);
  if (turns > 0) weights.template load<true>(ring + kOperandBytes);
  ptx::launch_dependents();  // the next GEMM may now put its own first weights in flight
  ptx::wait_for_dependencies();

  Stream tokens(params.activations, params.activation_stride, params.activation_scales, params.m, first_m,
                params.k, slice, group_thread);
  if (turns > 0) tokens.template load<kWholeChunks>(ring);
  ptx::cp_async_commit();

  const WarpView view(strip_m * kStripBytes, kOperandBytes + strip_n * kStripBytes, lane);
  Accumulators sums = {};
  uint32_t stage = ring;
  int blocks = params.k / kScaleBlock - slice * kUnitBlocks;  // left, from the current unit on
  for (int left = turns; left > 0; --left) {
    const uint32_t next = stage == ring ? ring + stage_bytes(kShape) : ring;
    ptx::cp_async_wait<0>();
    sync_group<kShape>();
    if (left > 1) {
      tokens.template load<kWholeChunks>(next);
      weights.template load<true>(next + kOperandBytes);
    }
    ptx::cp_async_commit();
    view.multiply(sums, stage, blocks);
    stage = next;
    blocks -= kSlices * kUnitBlocks;
  }

  const Epilogue epilogue(params, first_m + strip_m, first_n + strip_n, lane);
  if constexpr (kSlices == 1) {
#pragma unroll
    for (int i = 0; i < kTilesA; ++i) epilogue.store(i, sums.tile[i]);
  } else {
    ptx::FragmentD total[kTilesB];
    ptx::sync_block();  // all rings have been read
    add_slices<kSlices>(sums, total, shared, slice, lane);
    epilogue.store(slice, total);
  }
}

}  // namespace sm120::tiled
