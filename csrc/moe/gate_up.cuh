// First launch: act(W13 x) of every (token, expert) pair, quantized, into the workspace.
//
// Grid: tiles of 16 intermediate columns (their gate and their up rows) * cluster by experts that may have
// tokens. A CTA finds its expert and the expert's tokens from topk_ids, puts the first weights in flight,
// quantizes the tokens while they come, and multiplies. Weights are the 16-row operand, up to eight tokens of
// the expert the 8-column one: a tile of weights is read once for eight tokens.
//
// What bounds it: the weight bytes of the experts that have tokens, rows * hidden_size * 0.5625 each, and
// three latencies in a row: topk_ids, then hidden and the first weights, then the sums of the other warps.
#pragma once

#include "../gemm_skinny/weights.cuh"
#include "../ptx/grid_dependency.cuh"
#include "activation.cuh"
#include "quantized_rows.cuh"
#include "routing.cuh"
#include "sums.cuh"
#include "weights.cuh"

namespace sm120::moe {

/// Row of w13 for local row 8 q + p: the gate's rows (or the first 16) at q = 0 and 1, the others at 2 and 3.
DEVICE_FN int gate_up_row(const Params& params, int tile, int q, int p) {
  const int local = q % 2 * 8 + p;
  if (params.activation == Activation::kSilu) {
    const bool first_half = (q < 2) == params.gate_first;
    return 16 * tile + local + (first_half ? 0 : params.intermediate);
  }
  const int row = 32 * tile + q / 2 * 16 + local;
  return row < params.intermediate ? row : params.intermediate - 1;  // its sums are not stored
}

/// The weights of one tile of an expert.
template <bool kAligned>
class GateUpWeights {
 public:
  DEVICE_FN GateUpWeights(const Params& params, int tile, uint32_t expert, int lane)
      : codes_(params.w13 + expert * (static_cast<int64_t>(w13_rows(params)) * (params.hidden_size / 2)),
               params.hidden_size, rows_of(params, tile, lane / 4).row, lane),
        scales_(params.w13_scales + expert * (scale_tile_offset((w13_rows(params) + 127) / 128, 0,
                                                                scale_tiles_along_k(params.hidden_size)))),
        k_(params.hidden_size),
        scale_row_(gate_up_row(params, tile, lane / 8, lane % 8)),
        lane_(lane) {}

  DEVICE_FN void load(uint32_t stage, int unit) const {
    codes_.load(stage, unit);
    load_scale_words(stage, scales_, k_, scale_row_, unit, lane_);
  }

 private:
  struct Quad {
    int row[4];
  };
  static DEVICE_FN Quad rows_of(const Params& params, int tile, int p) {
    return {{gate_up_row(params, tile, 0, p), gate_up_row(params, tile, 1, p),
             gate_up_row(params, tile, 2, p), gate_up_row(params, tile, 3, p)}};
  }

  CodeRows<kAligned> codes_;
  const uint8_t* scales_;
  int k_, scale_row_, lane_;
};

template <bool kAligned>
DEVICE_FN void load_first_units(const GateUpWeights<kAligned>& weights, uint32_t ring,
                                const skinny::UnitRange& range) {
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < range.count) weights.load(ring + stage * skinny::kUnitBytes, range.first + stage * kWarps);
    ptx::cp_async_commit();
  }
}

/// The warp's units; its ring holds the first kStages.
template <bool kAligned>
DEVICE_FN void multiply_units(Sums& sums, const GateUpWeights<kAligned>& weights, uint32_t ring,
                              const Rows& rows, const skinny::UnitRange& range, int k, int lane) {
  uint32_t stage = ring;
  int unit = range.first;
  for (int left = range.count; left > 0; --left) {
    skinny::TokenUnit<1> tokens = token_unit(rows, unit, lane);
    ptx::cp_async_wait<kStages - 1>();
    ptx::sync_warp();  // the other lanes' copies have landed too
    skinny::multiply_unit(sums, stage, tokens, (k - unit * skinny::kUnitK) / kBlock, lane);
    ptx::sync_warp();  // nobody reads this stage any more
    if (left > kStages) weights.load(stage, unit + kStages * kWarps);
    ptx::cp_async_commit();  // also when empty: the wait above counts groups
    stage = stage == ring ? ring + skinny::kUnitBytes : ring;
    unit += kWarps;
  }
}
static_assert(kStages == 2, "stages alternate");

template <InputType kType, bool kAligned>
KERNEL_FN void __launch_bounds__(kThreads, 2) gate_up_kernel(const GRID_CONSTANT KernelParams params) {
  const int thread = ptx::thread_index();
  const int lane = thread % 32;
  const int shift = params.config.gate_up_shift;
  const int rank = ptx::block_index() & ((1 << shift) - 1);
  const int tile = ptx::block_index() >> shift;
  const int units = units_along(params.hidden_size);
  const int slice_units = (units + (1 << shift) - 1) >> shift;
  const GateUpShared shared(params, slice_units, params.config.gate_up_rows);
  const uint32_t base = ptx::dynamic_shared_base();
  const uint32_t ring = base + thread / 32 * kRingBytes;
  const skinny::UnitRange range = skinny::units_of_warp(params.hidden_size, rank, shift, thread / 32);

  // In this order: whoever starts because of the second may rely on everything in front of the first
  // (down.cuh).
  ptx::wait_for_dependencies();
  ptx::launch_dependents();

  mark_experts(params, base + shared.experts_of_pairs, base + shared.active, thread);
  const uint32_t expert = nth_expert(params, base + shared.active, ptx::block_index_y());
  if (expert == kNoExpert) return;
  const GateUpWeights<kAligned> weights(params, tile, expert, lane);
  load_first_units(weights, ring, range);
  const int tokens = list_tokens(params, shared, base, expert, thread);
  const float scale = ptx::load_global_f32(params.input_scale + (params.input_scale_per_expert ? expert : 0));

  Rows rows = {base + static_cast<uint32_t>(shared.tokens),
               base + static_cast<uint32_t>(shared.rows),
               shared.row_pitch,
               slice_units * skinny::kUnitRowBytes,
               0,
               (rank * units) >> shift};
  for (int first = 0; first < tokens; first += rows.count) {
    const int left = tokens - first;
    rows.list = base + shared.tokens + 4 * first;
    rows.count = left < params.config.gate_up_rows ? left : params.config.gate_up_rows;
    if (first > 0) {
      ptx::sync_block();  // the last sums have been read, where the rings are
      load_first_units(weights, ring, range);
    }
    const Inbox inbox(base + kInbox, rank, shift, rows.count);
    inbox.open(thread);  // without peers nothing; with them there is one turn
    if (range.count > 0) RowQuantizer<kType>(params, rows, range, scale, lane).run();
    ptx::sync_warp();
    Sums sums = {};
    multiply_units(sums, weights, ring, rows, range, params.hidden_size, lane);
    const ActivationWriter writer(params, tile, expert, rows.list);
    reduce(sums, base, inbox, rows.count, thread, writer);
  }
}

}  // namespace sm120::moe
