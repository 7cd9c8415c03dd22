// Second launch: out = sum over the slots of weight * w2_alpha * W2 q(activation).
//
// Grid: blocks of eight tokens * cluster by tiles of 32 output columns. The items of a CTA are (expert, unit
// of 128 k) for the distinct experts of its tokens, dealt out to its warps in equal runs; columns of the mma
// are the tokens themselves, so that the sums of all experts stay in registers, and a token that has nothing
// to do with the expert is masked. So the reduction over the slots needs no memory and no atomics: items in a
// fixed order in a warp, then warps, then CTAs of the cluster. One token with eight experts of 512 is 32
// items, as much parallelism as a GEMM of K = 4096.
//
// Order and experts of a block depend on its tokens, so a token's last bits depend on the other seven, unlike
// in the dense GEMM. Calls repeat bit for bit.
//
// Dependent launch. In front of its wait this kernel reads weights, their scales, and also topk_ids and
// topk_weights, which the router in front of the *first* kernel wrote. That is allowed: a CTA of this kernel
// exists only once every thread of the first has called launch_dependents, each of them after its own wait,
// that is after the router had finished and its writes were performed at the GPU's coherence point. Loads
// that bypass L1 (load_coherent_u32) cannot see anything older. The first kernel alone lies between; hence
// launch_moe always launches the two together.
#pragma once

#include "../gemm_skinny/weights.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/grid_dependency.cuh"
#include "block_routing.cuh"
#include "sums.cuh"
#include "weights.cuh"

namespace sm120::moe {

/// An item: a unit of K of one of the block's experts. Items follow each other along K first, and a warp has
/// a contiguous share of them: what belongs to an expert is looked up once for several items.
struct Item {
  int index;  // of the expert in the list
  int unit;

  /// Go on; whether the next item is another expert's.
  DEVICE_FN bool advance(int units) {
    if (++unit < units) return false;
    unit = 0;
    ++index;
    return true;
  }
};

/// A warp's items of w2, as many units ahead as the ring has stages.
template <bool kAligned>
class DownWeights {
 public:
  /// Stands at `item`, which has to exist if `left` is not 0.
  DEVICE_FN DownWeights(const Params& params, const TokenBlock& tokens, int tile, const Item& item, int left,
                        int lane)
      : codes_(params.intermediate, lane),
        scales_(params.intermediate, lane),
        params_(params),
        tokens_(tokens),
        item_(item),
        units_(units_along(params.intermediate)),
        tile_(tile),
        left_(left),
        lane_(lane) {
    if (left > 0) find_expert();
  }

  /// Start the copies of the next item, if there is one.
  DEVICE_FN void load(uint32_t stage) {
    if (left_ > 0) {
      codes_.load(stage);
      scales_.load_chunks(stage);
      const bool other_expert = item_.advance(units_);
      if (--left_ > 0) {
        if (other_expert) {
          find_expert();
        } else {
          codes_.template advance<1>();
          scales_.template advance<1>();
        }
      }
    }
    ptx::cp_async_commit();  // also when empty: waits count groups
  }

 private:
  DEVICE_FN void find_expert() {
    const uint32_t expert = ptx::load_shared_u32(tokens_.list + 4 * item_.index);
    int rows[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int row = skinny::first_row(tile_) + q * kScaleQuarterRows + lane_ / 4;
      rows[q] = row < params_.hidden_size ? row : params_.hidden_size - 1;  // its sums are not stored
    }
    const int64_t bytes = static_cast<int64_t>(params_.hidden_size) * (params_.intermediate / 2);
    const int64_t scale_bytes = scale_tile_offset((params_.hidden_size + kScaleTileRows - 1) / kScaleTileRows,
                                                  0, scale_tiles_along_k(params_.intermediate));
    codes_.move_to(params_.w2 + expert * bytes, rows, item_.unit);
    scales_.move_to_chunks(params_.w2_scales + expert * scale_bytes, tile_, item_.unit);
  }

  CodeRows<kAligned> codes_;
  ScaleRows scales_;
  const Params& params_;
  const TokenBlock& tokens_;
  Item item_;
  int units_, tile_, left_, lane_;
};

/// Activations of an item: of the token of column lane / 4.
struct DownItem {
  skinny::TokenUnit<1> tokens;
  bool live;  // whether that column has the expert
};

/// The same for the activations, from the workspace.
class DownTokens {
 public:
  /// Stands at `item`, which has to exist.
  DEVICE_FN DownTokens(const Params& params, const TokenBlock& tokens, const Item& item, int lane)
      : params_(params),
        tokens_(tokens),
        item_(item),
        units_(units_along(params.intermediate)),
        lane_(lane) {}

  /// Start fetching the item and go on to the next. Only shared memory is waited for. What lies past the end
  /// of K repeats what is in front of it: scales are masked in multiply_unit.
  DEVICE_FN void load(DownItem& fetched) {
    if (other_expert_) find_expert();
    if (blocks_ >= kUnitBlocks) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fetched.tokens.codes[i / 2][0].reg[i % 2] = ptx::load_global_u32(codes_ + 16 * i);
      }
      fetched.tokens.scales[0] = ptx::load_global_u32(scales_);
    } else {
      const int last_byte = 8 * blocks_ - 4 - 4 * (lane_ % 4);  // from codes_ on
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fetched.tokens.codes[i / 2][0].reg[i % 2] =
            ptx::load_global_u32(codes_ + (16 * i < last_byte ? 16 * i : last_byte));
      }
      const bool past = lane_ % 2 != 0 && blocks_ <= kUnitBlocks / 2;
      fetched.tokens.scales[0] = ptx::load_global_u32(scales_ - (past ? 4 : 0));
    }
    fetched.live = live_;
    other_expert_ = item_.advance(units_);
    codes_ += skinny::kUnitRowBytes;
    scales_ += kUnitBlocks;
    blocks_ -= kUnitBlocks;
  }

 private:
  static constexpr int kUnitBlocks = skinny::kUnitK / kBlock;

  /// A column without the expert reads some row, and its scales are masked.
  DEVICE_FN void find_expert() {
    const uint32_t pair = ptx::load_shared_u32(pair_entry(tokens_, item_.index, lane_ / 4));
    live_ = pair != kNoPair;
    const int64_t row = static_cast<int64_t>(tokens_.first) * params_.top_k + (live_ ? pair : 0);
    codes_ = params_.workspace + row * code_row_bytes(params_.intermediate) +
             item_.unit * skinny::kUnitRowBytes + 4 * (lane_ % 4);
    scales_ = params_.workspace + code_row_bytes(params_.intermediate) * params_.m * params_.top_k +
              row * scale_row_bytes(params_.intermediate) + item_.unit * kUnitBlocks + 4 * (lane_ % 2);
    blocks_ = params_.intermediate / kBlock - item_.unit * kUnitBlocks;
  }

  const Params& params_;
  const TokenBlock& tokens_;
  Item item_;
  int units_, lane_;
  bool other_expert_ = true;  // than what the rest is of
  const uint8_t* codes_ = nullptr;
  const uint8_t* scales_ = nullptr;
  int blocks_ = 0;  // of K, from the item on
  bool live_ = false;
};

/// Add an expert's sums, weighted, to the columns that have it. The others are left alone: their product is 0
/// only if no scale of the weights is NaN.
DEVICE_FN void add_expert(Sums& totals, const Sums& sums, const TokenBlock& tokens, int index, float alpha,
                          int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t pair = ptx::load_shared_u32(pair_entry(tokens, index, 2 * (lane % 4) + i));
    if (pair == kNoPair) continue;
    const float factor = alpha * ptx::load_shared_f32(tokens.weights + 4 * pair);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        totals.tile[tile][0].reg[2 * half + i] += factor * sums.tile[tile][0].reg[2 * half + i];
      }
    }
  }
}

class OutputWriter {
 public:
  DEVICE_FN OutputWriter(const Params& params, int first_token, int tile)
      : out_(static_cast<uint8_t*>(params.out)),
        stride_(params.out_stride),
        first_token_(first_token),
        tile_(tile),
        columns_(params.hidden_size),
        type_(params.type) {}

  /// See sums.cuh.
  DEVICE_FN void operator()(int column, int pair, const ptx::Float2& sum, bool live) const {
    const int output = skinny::global_row(tile_, 2 * pair);
    if (!live || output >= columns_) return;
    ptx::store_global_u32(
        out_ + 2 * ((first_token_ + column) * stride_ + output),
        type_ == OutputType::kBfloat16 ? ptx::pack_bf16x2(sum.x, sum.y) : ptx::pack_f16x2(sum.x, sum.y));
  }

 private:
  uint8_t* out_;
  int64_t stride_;
  int first_token_, tile_, columns_;
  OutputType type_;
};

template <bool kAligned>
KERNEL_FN void __launch_bounds__(kThreads, 2) down_kernel(const GRID_CONSTANT KernelParams params) {
  const int thread = ptx::thread_index();
  const int lane = thread % 32;
  const int shift = params.config.down_shift;
  const int rank = ptx::block_index() & ((1 << shift) - 1);
  const int tile = ptx::block_index_y();
  const uint32_t base = ptx::dynamic_shared_base();
  const uint32_t ring = base + thread / 32 * kRingBytes;

  const TokenBlock tokens = route_block(params, base, ptx::block_index() >> shift, thread);
  const int units = units_along(params.intermediate);
  const bool rows_exist = skinny::first_row(tile) < params.hidden_size;
  const Share share =
      share_of(rows_exist ? tokens.experts * units : 0, kWarps << shift, rank * kWarps + thread / 32);
  int left = share.end - share.begin;
  Item item = {share.begin / units, share.begin % units};
  DownWeights<kAligned> weights(params, tokens, tile, item, left, lane);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) weights.load(ring + stage * skinny::kUnitBytes);
  list_pairs(params, tokens, thread);
  const Inbox inbox(base + kInbox, rank, shift, tokens.count);
  // Its memory held the experts' bits, which nobody needs any more.
  inbox.open(thread);
  ptx::sync_block();  // the table of pairs is complete
  ptx::launch_dependents();
  ptx::wait_for_dependencies();

  Sums totals = {};
  if (left > 0) {
    DownTokens activations(params, tokens, item, lane);
    DownItem current;
    DownItem next;
    activations.load(current);
    Sums sums = {};
    float alpha = 0.0f;
    bool other_expert = true;
    uint32_t stage = ring;
    for (; left > 0; --left) {
      const int index = item.index;
      const int blocks = (params.intermediate - item.unit * skinny::kUnitK) / kBlock;
      if (other_expert) {
        const uint32_t expert = ptx::load_shared_u32(tokens.list + 4 * index);
        alpha = ptx::load_global_f32(params.w2_alpha + expert);
      }
      if (left > 1) activations.load(next);
      if (!current.live) current.tokens.scales[0] = 0;
      ptx::cp_async_wait<kStages - 1>();
      ptx::sync_warp();  // the other lanes' copies have landed too
      skinny::multiply_unit(sums, stage, current.tokens, blocks, lane);
      ptx::sync_warp();  // nobody reads this stage any more
      weights.load(stage);
      other_expert = item.advance(units);
      if (other_expert || left == 1) {
        add_expert(totals, sums, tokens, index, alpha, lane);
        sums = {};
      }
      stage = stage == ring ? ring + skinny::kUnitBytes : ring;
      current = next;
    }
  }
  const OutputWriter writer(params, tokens.first, tile);
  // The warp's own ring is free: its last stage has been multiplied.
  reduce(totals, base, kRingBytes, inbox, tokens.count, thread, writer);
}

}  // namespace sm120::moe
