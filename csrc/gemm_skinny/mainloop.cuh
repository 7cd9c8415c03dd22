// One unit of work: 2 mma tiles of 16 weight rows x kTokenTiles tiles of 8 tokens x 2 steps of k64.
#pragma once

#include "../ptx/ldmatrix.cuh"
#include "../ptx/thread.cuh"
#include "tokens.cuh"
#include "weights.cuh"

namespace sm120::skinny {

template <int kTokenTiles>
struct Accumulators {
  ptx::FragmentD tile[2][kTokenTiles];
};

/// Scales past the end of K are padding that may hold anything; `blocks` are left in this unit.
template <int kTokenTiles>
DEVICE_FN void mask_scales(ptx::Word2& weight_scales, TokenUnit<kTokenTiles>& tokens, int blocks, int lane) {
  const uint32_t weight_mask = scale_mask(blocks - 4 * (lane % 4 / 2));
  const uint32_t token_mask = scale_mask(blocks - 4 * (lane % 2));
  weight_scales.x &= weight_mask;
  weight_scales.y &= weight_mask;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) tokens.scales[tile] &= token_mask;
}

template <int kStep, int kTokenTiles>
DEVICE_FN void multiply_step(Accumulators<kTokenTiles>& sums, uint32_t stage, const ptx::Word2& weight_scales,
                             const TokenUnit<kTokenTiles>& tokens, int lane) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    // Matrices a0..a3: rows g, rows g + 8, then both again 16 bytes (32 k) further.
    const int matrix = lane / 8;
    const int local_row = 8 * (tile + 2 * (matrix % 2)) + lane % 8;
    ptx::FragmentA weights;
    ptx::ldmatrix_x4(weights, stage + weight_offset(local_row, 2 * kStep + matrix / 2));
    const uint32_t scale = tile == 0 ? weight_scales.x : weight_scales.y;
#pragma unroll
    for (int column = 0; column < kTokenTiles; ++column) {
      ptx::mma_nvfp4<kStep, kStep>(sums.tile[tile][column], weights, tokens.codes[kStep][column], scale,
                                   tokens.scales[column]);
    }
  }
}

template <int kTokenTiles>
DEVICE_FN void multiply_unit(Accumulators<kTokenTiles>& sums, uint32_t stage, TokenUnit<kTokenTiles>& tokens,
                             int blocks, int lane) {
  const int t = lane % 4;
  ptx::Word2 weight_scales = ptx::load_shared_u32x2(stage + scale_offset(t / 2, lane / 4, 2 * (t % 2)));
  if (blocks < kUnitK / kScaleBlock) mask_scales(weight_scales, tokens, blocks, lane);
  multiply_step<0>(sums, stage, weight_scales, tokens, lane);
  multiply_step<1>(sums, stage, weight_scales, tokens, lane);
}

/// Work through the warp's units; its ring holds the first kStages already. Tokens are fetched one unit
/// ahead. `Tokens` is TokenStream or what does the same (quantizing_tokens.cuh).
template <int kTokenTiles, int kStages, typename Tokens>
DEVICE_FN void multiply_slice(Accumulators<kTokenTiles>& sums, uint32_t ring, WeightStream& weights,
                              Tokens& tokens, UnitRange range, int k, int lane) {
  TokenUnit<kTokenTiles> current;
  typename Tokens::Fetched next;
  uint32_t stage = ring;
  constexpr int kUnitBlocks = kUnitK / kScaleBlock;
  int blocks = (k - range.first * kUnitK) / kScaleBlock;  // left, from the current unit on
  if (range.count > 0) {
    tokens.load(next);
    tokens.finish(next, current);
  }
  for (int left = range.count; left > 0; --left) {
    if (left > 1) tokens.load(next);
    ptx::cp_async_wait<kStages - 1>();
    ptx::sync_warp();  // the other lanes' copies have landed too
    multiply_unit(sums, stage, current, blocks, lane);
    ptx::sync_warp();  // nobody reads this stage any more
    if (left > kStages) weights.template load<kStages>(stage);
    ptx::cp_async_commit();  // also when empty: the wait above counts groups
    weights.advance();
    stage = stage + kUnitBytes == ring + kStages * kUnitBytes ? ring : stage + kUnitBytes;
    blocks -= kWarps * kUnitBlocks;
    if (Tokens::kFinishIsFree || left > 1) tokens.finish(next, current);
  }
}

}  // namespace sm120::skinny
