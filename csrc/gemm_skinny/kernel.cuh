// NVFP4 GEMM for up to 64 tokens. Weights are the 16-row operand of the mma, tokens the 8-column one
// ("swap-AB"), so one to eight tokens cost one mma column and no padded rows.
//
// What bounds it: the weight bytes, N * K * 0.5625, and the time until the first of them arrive. So the
// kernel is arranged to have the first units of every warp in flight before anything else happens, on as many
// SMs as possible: narrow row tiles (32), K split over the 8 warps of a CTA and, for small N, over a cluster
// of CTAs.
//
// Launch: grid = row_tiles(n) * cluster by ceil(m / 64), kThreads threads, shared_bytes() of dynamic shared
// memory. With programmatic dependent launch the weights must not be written by the kernel directly in front
// (they are constant while serving).
#pragma once

#include "../ptx/grid_dependency.cuh"
#include "quantizing_tokens.cuh"
#include "reduce.cuh"

namespace sm120::skinny {

template <int kStages, int kStage = 0>
DEVICE_FN void load_first_stages(const WeightStream& weights, uint32_t ring, int count) {
  if constexpr (kStage < kStages) {
    if (kStage < count) weights.template load<kStage>(ring + kStage * kUnitBytes);
    ptx::cp_async_commit();
    load_first_stages<kStages, kStage + 1>(weights, ring, count);
  }
}

/// CTAs that share an SM.
constexpr int resident_ctas(int token_tiles) {
  return token_tiles <= 2 ? 2 : 1;
}

/// The whole kernel. `Tokens` is where the activations come from: TokenStream or QuantizingTokenStream.
template <int kTokenTiles, int kStages, typename Tokens, typename KernelParams>
DEVICE_FN void gemm_body(const KernelParams& params) {
  const int thread = ptx::thread_index();
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int tile = ptx::block_index() >> params.cluster_shift;
  const TokenBlock block = token_block(params.m, ptx::block_index_y());

  const uint32_t rings = ptx::dynamic_shared_base();
  const uint32_t ring = rings + warp * kStages * kUnitBytes;
  const int rank = ptx::block_index() & ((1 << params.cluster_shift) - 1);
  UnitRange range = units_of_warp(params.k, rank, params.cluster_shift, warp);
  if (first_row(tile) >= params.n) range.count = 0;  // the last 128-row block may have tiles without any row

  WeightStream weights(params, tile, range.first, lane);
  load_first_stages<kStages>(weights, ring, range.count);
  const ClusterInbox<kTokenTiles> inbox(rings + kWarps * kStages * kUnitBytes, rank, params.cluster_shift,
                                        block.count);
  inbox.open(thread);
  ptx::launch_dependents();  // the next GEMM may now put its own first weights in flight
  ptx::wait_for_dependencies();

  Tokens tokens(params, block, range.first, lane);
  const Epilogue epilogue(params, block.first, tile, thread);
  Accumulators<kTokenTiles> sums = {};
  multiply_slice<kTokenTiles, kStages>(sums, ring, weights, tokens, range, params.k, lane);
  reduce_and_store<kTokenTiles, kStages>(sums, epilogue, rings, inbox, block.count);
}

template <int kTokenTiles, int kStages>
KERNEL_FN void __launch_bounds__(kThreads, resident_ctas(kTokenTiles))
    gemm_kernel(const GRID_CONSTANT Params params) {
  gemm_body<kTokenTiles, kStages, TokenStream<kTokenTiles>>(params);
}

/// The same sums, bit for bit, from activations that are not quantized yet; up to kMaxQuantizedTokens.
template <quantize::InputType kType, int kTokenTiles, int kStages>
KERNEL_FN void __launch_bounds__(kThreads, resident_ctas(kTokenTiles))
    quantizing_gemm_kernel(const GRID_CONSTANT QuantizingParams params) {
  gemm_body<kTokenTiles, kStages, QuantizingTokenStream<kType, kTokenTiles>>(params);
}

}  // namespace sm120::skinny
