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

/// The weights of an expert. Local rows 0..15 are the gate's rows of a tile, 16..31 those that they are
/// multiplied with; without a gate 32 rows as they come.
template <bool kAligned>
class GateUpWeights {
 public:
  DEVICE_FN GateUpWeights(const Params& params, uint32_t expert, int lane)
      : weights_(params.w13 + expert * (static_cast<int64_t>(w13_rows(params)) * (params.hidden_size / 2))),
        scales_(params.w13_scales + expert * scale_tile_offset((w13_rows(params) + 127) / 128, 0,
                                                               scale_tiles_along_k(params.hidden_size))),
        k_(params.hidden_size),
        last_row_(w13_rows(params) - 1),
        lane_(lane) {
    const bool gated = params.activation == Activation::kSilu;
    tile_rows_ = gated ? 16 : 32;
    first_[0] = gated && !params.gate_first ? params.intermediate : 0;
    first_[1] = !gated ? 16 : params.gate_first ? params.intermediate : 0;
  }

  /// Start the copies of a unit of `tile`.
  DEVICE_FN void load(uint32_t stage, int tile, int unit) const {
    int rows[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) rows[q] = row(tile, q, lane_ / 4);
    CodeRows<kAligned>(weights_, k_, rows, lane_).load(stage, unit);
    load_scale_words(stage, scales_, k_, row(tile, lane_ / 8, lane_ % 8), unit, lane_);
  }

 private:
  /// Clamped: the last tile without a gate may have 16 rows, the sums of the others are not stored.
  DEVICE_FN int row(int tile, int q, int p) const {
    const int wanted = tile * tile_rows_ + (q < 2 ? first_[0] : first_[1]) + q % 2 * 8 + p;
    return wanted < last_row_ ? wanted : last_row_;
  }

  const uint8_t* weights_;
  const uint8_t* scales_;
  int k_, last_row_, lane_, tile_rows_;
  int first_[2];
};

/// What a warp multiplies, tile by tile: its units of K of each. Its ring holds the next kStages of them.
template <bool kAligned>
class GateUpStream {
 public:
  DEVICE_FN GateUpStream(const GateUpWeights<kAligned>& weights, uint32_t ring,
                         const skinny::UnitRange& range, int end_tile)
      : weights_(weights), range_(range), ring_(ring), end_(end_tile) {}

  /// Put the first stages in flight, from `tile` on.
  DEVICE_FN void start(int tile) {
    stage_ = ring_;
    tile_ = range_.count > 0 ? tile : end_;
    turn_ = 0;
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) load_next(ring_ + stage * skinny::kUnitBytes);
  }

  /// Multiply the warp's units of the next tile.
  DEVICE_FN void multiply_tile(Sums& sums, const Rows& rows, int k, int lane) {
    for (int unit = range_.first; unit < range_.first + range_.count * kWarps; unit += kWarps) {
      skinny::TokenUnit<1> tokens = token_unit(rows, unit, lane);
      ptx::cp_async_wait<kStages - 1>();
      ptx::sync_warp();  // the other lanes' copies have landed too
      skinny::multiply_unit(sums, stage_, tokens, (k - unit * skinny::kUnitK) / kBlock, lane);
      ptx::sync_warp();  // nobody reads this stage any more
      load_next(stage_);
      stage_ = stage_ == ring_ ? ring_ + skinny::kUnitBytes : ring_;
    }
  }

 private:
  static_assert(kStages == 2, "stages alternate");

  DEVICE_FN void load_next(uint32_t stage) {
    if (tile_ < end_) {
      weights_.load(stage, tile_, range_.first + turn_ * kWarps);
      if (++turn_ == range_.count) {
        turn_ = 0;
        ++tile_;
      }
    }
    ptx::cp_async_commit();  // also when empty: waits count groups
  }

  const GateUpWeights<kAligned>& weights_;
  const skinny::UnitRange& range_;
  uint32_t ring_, stage_;
  int end_;
  int tile_, turn_;  // what is loaded next
};

template <InputType kType, bool kAligned>
KERNEL_FN void __launch_bounds__(kThreads, 2) gate_up_kernel(const GRID_CONSTANT KernelParams params) {
  const int thread = ptx::thread_index();
  const int lane = thread % 32;
  const int shift = params.config.gate_up_shift;
  const int rank = ptx::block_index() & ((1 << shift) - 1);
  const int first_tile = (ptx::block_index() >> shift) * params.config.gate_up_tiles;
  const int wanted_end = first_tile + params.config.gate_up_tiles;
  const int end_tile = wanted_end < gate_up_tiles(params) ? wanted_end : gate_up_tiles(params);
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
  const GateUpWeights<kAligned> weights(params, expert, lane);
  GateUpStream<kAligned> stream(weights, ring, range, end_tile);
  stream.start(first_tile);
  const int tokens = list_tokens(params, shared, base, expert, thread);
  const float scale = ptx::load_global_f32(params.input_scale + (params.input_scale_per_expert ? expert : 0));

  const uint32_t pitch = params.config.gate_up_rows * kPartialBytes;
  Rows rows = {0,
               base + static_cast<uint32_t>(shared.rows),
               shared.row_pitch,
               slice_units * skinny::kUnitRowBytes,
               0,
               (rank * units) >> shift};
  for (int first = 0; first < tokens; first += rows.count) {
    const int left = tokens - first;
    rows.list = base + shared.tokens + 4 * first;
    rows.count = left < params.config.gate_up_rows ? left : params.config.gate_up_rows;
    if (first > 0) stream.start(first_tile);
    const Inbox inbox(base + kInbox, rank, shift, rows.count);
    inbox.open(thread);  // without peers nothing; with them there is one turn
    if (range.count > 0) RowQuantizer<kType>(params, rows, range, scale, lane).run();
    ptx::sync_warp();
    for (int tile = first_tile; tile < end_tile; ++tile) {
      Sums sums = {};
      stream.multiply_tile(sums, rows, params.hidden_size, lane);
      if (first > 0 || tile > first_tile) ptx::sync_block();  // the last partial sums have been read
      const ActivationWriter writer(params, tile, expert, rows.list);
      reduce(sums, base + shared.partials, pitch, inbox, rows.count, thread, writer);
    }
  }
}

}  // namespace sm120::moe
