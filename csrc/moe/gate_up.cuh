// First launch: act(W13 x) of every (token, expert) pair, quantized, into the workspace.
//
// Grid: as many CTAs as the card holds at once (choose_config in config.h). All tiles of 16 intermediate
// columns (their gate and their up rows) of all experts that have tokens, expert by expert, are dealt out to
// them in equal runs. For each expert in its run a CTA finds the tokens, puts the first weights in flight,
// quantizes the tokens while they come, and multiplies tile by tile. Weights are the 16-row operand, up to
// eight tokens of the expert the 8-column one: a tile of weights is read once for eight tokens. Where tiles
// are scarce a cluster shares the K of one.
//
// What bounds it: the weight bytes of the experts that have tokens, rows * hidden_size * 0.5625 each, and
// three latencies in a row: topk_ids, then hidden and the first weights, then the sums of the other warps.
// On the decoded path it is instructions. So what a CTA does once, what it does for an expert, for a tile and
// for a unit are kept apart, and a unit costs the multiply, five loads from shared memory, six copies and
// additions.
#pragma once

#include "../gemm_skinny/weights.cuh"
#include "../ptx/grid_dependency.cuh"
#include "activation.cuh"
#include "quantized_rows.cuh"
#include "routing.cuh"
#include "sums.cuh"
#include "weights.cuh"

namespace sm120::moe {

/// A warp's units of an expert's weights, tile by tile. Local rows 0..15 are the gate's rows of a
/// tile, 16..31 those that they are multiplied with; without a gate 32 rows as they come.
template <bool kAligned>
class GateUpWeights {
 public:
  /// Stands nowhere.
  DEVICE_FN GateUpWeights(const Params& params, int first_unit, int lane)
      : codes_(params.hidden_size, lane),
        scales_(params.hidden_size, lane),
        params_(params),
        first_unit_(first_unit),
        lane_(lane) {
    const bool gated = params.activation == Activation::kSilu;
    tile_rows_ = gated ? 16 : 32;
    first_[0] = gated && !params.gate_first ? params.intermediate : 0;
    first_[1] = !gated ? 16 : params.gate_first ? params.intermediate : 0;
  }

  /// Go to the warp's first unit of a tile.
  DEVICE_FN void move_to(uint32_t expert, int tile) {
    const int all_rows = w13_rows(params_);
    expert_scales_ =
        params_.w13_scales + expert * scale_tile_offset((all_rows + kScaleTileRows - 1) / kScaleTileRows, 0,
                                                        scale_tiles_along_k(params_.hidden_size));
    move_codes(expert, tile);
    move_scales(tile);
  }

  /// From the warp's last unit of the tile in front of `tile`, `units` of them further, to its first one.
  DEVICE_FN void move_down(uint32_t expert, int tile, int units) {
    if (tile_rows_ == 16) {
      codes_.move_down(16, (units - 1) * kWarps);
    } else {
      move_codes(expert, tile);  // may be clamped
    }
    move_scales(tile);
  }

  /// Start the copies of the unit.
  DEVICE_FN void load(uint32_t stage) const {
    codes_.load(stage);
    scales_.load_words(stage);
  }

  /// Go to the warp's next unit of the tile.
  DEVICE_FN void advance() {
    codes_.template advance<kWarps>();
    scales_.template advance<kWarps>();
  }

 private:
  DEVICE_FN void move_codes(uint32_t expert, int tile) {
    int rows[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) rows[q] = row(tile, q, lane_ / 4);
    const int64_t bytes = static_cast<int64_t>(w13_rows(params_)) * (params_.hidden_size / 2);
    codes_.move_to(params_.w13 + expert * bytes, rows, first_unit_);
  }

  DEVICE_FN void move_scales(int tile) {
    scales_.move_to_words(expert_scales_, static_cast<uint32_t>(row(tile, lane_ / 8, lane_ % 8)),
                          first_unit_);
  }

  /// Clamped: the last tile without a gate may have 16 rows, the sums of the others are not stored.
  DEVICE_FN int row(int tile, int q, int p) const {
    const int last_row = w13_rows(params_) - 1;
    const int wanted = tile * tile_rows_ + (q < 2 ? first_[0] : first_[1]) + q % 2 * 8 + p;
    return wanted < last_row ? wanted : last_row;
  }

  CodeRows<kAligned> codes_;
  ScaleRows scales_;
  const Params& params_;
  const uint8_t* expert_scales_ = nullptr;
  int first_unit_, lane_, tile_rows_;
  int first_[2];
};

/// What a warp multiplies, tile by tile: its units of K of each. Its ring holds the next kStages of them.
template <bool kAligned>
class GateUpStream {
 public:
  DEVICE_FN GateUpStream(const Params& params, uint32_t ring, const skinny::UnitRange& range, int lane)
      : weights_(params, range.first, lane), count_(range.count), ring_(ring) {}

  /// Put the first stages in flight: tiles `tile` to `end` of an expert, which is one at least.
  DEVICE_FN void start(uint32_t expert, int tile, int end) {
    expert_ = expert;
    end_ = end;
    stage_ = ring_;
    tile_ = count_ > 0 ? tile : end;
    turn_ = 0;
    if (count_ > 0) weights_.move_to(expert, tile);
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) load_next(ring_ + stage * skinny::kUnitBytes);
  }

  /// Multiply the warp's units of the next tile; `blocks` of K are left from the first one on.
  DEVICE_FN void multiply_tile(Sums& sums, RowStream tokens, int blocks, int lane) {
    for (int left = count_; left > 0; --left) {
      skinny::TokenUnit<1> unit = tokens.load();
      ptx::cp_async_wait<kStages - 1>();
      ptx::sync_warp();  // the other lanes' copies have landed too
      skinny::multiply_unit(sums, stage_, unit, blocks, lane);
      ptx::sync_warp();  // nobody reads this stage any more
      load_next(stage_);
      stage_ = stage_ == ring_ ? ring_ + skinny::kUnitBytes : ring_;
      blocks -= kWarps * (skinny::kUnitK / kBlock);
    }
  }

 private:
  static_assert(kStages == 2, "stages alternate");

  DEVICE_FN void load_next(uint32_t stage) {
    if (tile_ < end_) {
      weights_.load(stage);
      if (++turn_ < count_) {
        weights_.advance();
      } else {
        turn_ = 0;
        if (++tile_ < end_) weights_.move_down(expert_, tile_, count_);
      }
    }
    ptx::cp_async_commit();  // also when empty: waits count groups
  }

  GateUpWeights<kAligned> weights_;
  int count_;
  uint32_t ring_, stage_;
  uint32_t expert_;
  int end_;
  int tile_, turn_;  // what is loaded next
};

template <InputType kType, bool kAligned>
KERNEL_FN void __launch_bounds__(kThreads, 2) gate_up_kernel(const GRID_CONSTANT KernelParams params) {
  const int thread = ptx::thread_index();
  const int lane = thread % 32;
  const int shift = params.config.gate_up_shift;
  const int rank = ptx::block_index() & ((1 << shift) - 1);
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
  const int tiles = gate_up_tiles(params);
  const Share share = share_of(count_experts(params, base + shared.active) * tiles,
                               params.config.gate_up_clusters, ptx::block_index() >> shift);
  GateUpStream<kAligned> stream(params, ring, range, lane);
  const uint32_t pitch = params.config.gate_up_rows * kPartialBytes;
  Rows rows = {0,
               base + static_cast<uint32_t>(shared.rows),
               shared.row_pitch,
               slice_units * skinny::kUnitRowBytes,
               0,
               (rank * units) >> shift};
  bool summed = false;  // whether there have been partial sums
  for (int at = share.begin; at < share.end;) {
    const int index = at / tiles;
    const int first_tile = at - index * tiles;
    const int left_tiles = share.end - at;
    const int end_tile = left_tiles < tiles - first_tile ? first_tile + left_tiles : tiles;
    at += end_tile - first_tile;
    const uint32_t expert = nth_expert(params, base + shared.active, index);
    const float scale =
        ptx::load_global_f32(params.input_scale + (params.input_scale_per_expert ? expert : 0));
    const ActivationWriter writer(params, expert);
    int tokens = 1;  // that there is one is known
    for (int first = 0; first < tokens; first += rows.count) {
      stream.start(expert, first_tile, end_tile);
      if (first == 0) tokens = list_tokens(params, shared, base, expert, thread);
      const int left = tokens - first;
      rows.list = base + shared.tokens + 4 * first;
      rows.count = left < params.config.gate_up_rows ? left : params.config.gate_up_rows;
      const Inbox inbox(base + kInbox, rank, shift, rows.count);
      inbox.open(thread);  // without peers nothing; with them there is one turn
      if (range.count > 0) RowQuantizer<kType>(params, rows, range, scale, lane).run();
      ptx::sync_warp();
      for (int tile = first_tile; tile < end_tile; ++tile) {
        Sums sums = {};
        stream.multiply_tile(sums, RowStream(rows, range.first, lane),
                             (params.hidden_size - range.first * skinny::kUnitK) / kBlock, lane);
        if (summed) ptx::sync_block();  // the last partial sums have been read
        summed = true;
        reduce(sums, base + shared.partials, pitch, inbox, rows.count, thread, writer.of(rows.list, tile));
      }
    }
  }
}

}  // namespace sm120::moe
