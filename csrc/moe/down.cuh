// Second launch: out = sum over the slots of weight * w2_alpha * W2 q(activation).
//
// Grid: blocks of eight tokens * cluster by tiles of 32 output columns. A CTA works through (expert, unit of
// 128 k) for the distinct experts of its tokens, one such item a warp at a time; columns of the mma are the
// tokens themselves, so that the sums of all experts stay in registers, and a token that has nothing to do
// with the expert is masked. So the reduction over the slots needs no memory and no atomics: items in a fixed
// order in a warp, then warps, then CTAs of the cluster. One token with eight experts of 512 is 32 items, as
// much parallelism as a GEMM of K = 4096.
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
#include "routing.cuh"
#include "sums.cuh"
#include "weights.cuh"

namespace sm120::moe {

/// The tokens of a CTA and their experts, in shared memory.
struct TokenBlock {
  uint32_t experts_of_pairs, weights, list;
  int first, count;
  int experts;  // distinct ones, in the list
};

/// Read the block's routing and list its distinct experts in the order of their first pair.
DEVICE_FN TokenBlock route_block(const Params& params, uint32_t base, int block, int thread) {
  const int first = block * kColumns;
  const int left = params.m - first;
  TokenBlock tokens = {
      base + kRouting, base + kDownWeights, base + kDownList, first, left < kColumns ? left : kColumns, 0};
  const int pairs = tokens.count * params.top_k;
  const int pair = first * params.top_k + thread;
  uint32_t expert = kNoExpert;
  uint32_t weight = 0;
  if (thread < pairs) {
    expert = local_expert(params, pair);
    weight = ptx::load_coherent_u32(params.topk_weights + pair);
  }
  ptx::store_shared_u32(tokens.experts_of_pairs + 4 * thread, expert);
  ptx::store_shared_u32(tokens.weights + 4 * thread, weight);
  ptx::sync_block();
  bool seen = expert == kNoExpert;
  for (int other = 0; other < thread && !seen; other += 4) {
    const ptx::Word4 four = ptx::load_shared_u32x4(tokens.experts_of_pairs + 4 * other);
    seen = four.x == expert || (other + 1 < thread && four.y == expert) ||
           (other + 2 < thread && four.z == expert) || (other + 3 < thread && four.w == expert);
  }
  const Place place = place_among(!seen, base + kDownCounts, thread);
  if (!seen) ptx::store_shared_u32(tokens.list + 4 * place.before, expert);
  tokens.experts = place.total;
  ptx::sync_block();
  return tokens;
}

/// An item: a unit of K of one of the block's experts. Items follow each other along K first.
struct ItemPlace {
  int index;  // of the expert in the list
  int unit;
};

/// What a lane has fetched for an item: the activations of column lane / 4, and what its sums count for.
struct DownItem {
  skinny::TokenUnit<1> tokens;
  float alpha;
  float weight;  // of column lane / 4
  bool live;     // whether that column has the expert
  int blocks;    // of K from this unit on
};

template <bool kAligned>
class DownStream {
 public:
  DEVICE_FN DownStream(const KernelParams& params, const TokenBlock& tokens, int tile, int lane)
      : params_(params),
        tokens_(tokens),
        tile_(tile),
        lane_(lane),
        units_(units_along(params.intermediate)),
        scale_stride_(
            scale_tile_offset((params.hidden_size + 127) / 128, 0, scale_tiles_along_k(params.intermediate))),
        activation_scales_(params.workspace + code_row_bytes(params.intermediate) * params.m * params.top_k) {
  }

  DEVICE_FN ItemPlace place(int item) const { return {item / units_, item % units_}; }

  DEVICE_FN bool exists(const ItemPlace& item) const { return item.index < tokens_.experts; }

  /// `item` plus as many as `step` is the place of.
  DEVICE_FN ItemPlace after(const ItemPlace& item, const ItemPlace& step) const {
    const int unit = item.unit + step.unit;
    const int carry = unit >= units_ ? 1 : 0;
    return {item.index + step.index + carry, unit - carry * units_};
  }

  /// Start the copies of an item's weights.
  DEVICE_FN void load_weights(uint32_t stage, const ItemPlace& item) const {
    const uint32_t expert = ptx::load_shared_u32(tokens_.list + 4 * item.index);
    int rows[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int row = skinny::first_row(tile_) + q * kScaleQuarterRows + lane_ / 4;
      rows[q] = row < params_.hidden_size ? row : params_.hidden_size - 1;  // its sums are not stored
    }
    const int64_t bytes = static_cast<int64_t>(params_.hidden_size) * (params_.intermediate / 2);
    CodeRows<kAligned>(params_.w2 + expert * bytes, params_.intermediate, rows, lane_).load(stage, item.unit);
    load_scale_chunks(stage, params_.w2_scales + expert * scale_stride_, params_.intermediate, tile_,
                      item.unit, lane_);
  }

  /// Start fetching an item's activations. Only shared memory is waited for.
  DEVICE_FN void load_tokens(DownItem& fetched, const ItemPlace& item) const {
    const uint32_t expert = ptx::load_shared_u32(tokens_.list + 4 * item.index);
    const int column = lane_ / 4 < tokens_.count ? lane_ / 4 : tokens_.count - 1;
    // Four lanes share the slots of a column. A token that names an expert twice has one activation, of the
    // first slot, and the sum of both weights.
    uint32_t slot = kMaxTopK;
    float weight = 0.0f;
    for (int s = lane_ % 4; s < params_.top_k; s += 4) {
      const int pair = column * params_.top_k + s;
      if (ptx::load_shared_u32(tokens_.experts_of_pairs + 4 * pair) != expert) continue;
      if (slot == kMaxTopK) slot = static_cast<uint32_t>(s);
      weight += ptx::load_shared_f32(tokens_.weights + 4 * pair);
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      const uint32_t other = ptx::shuffle_xor(slot, mask);
      slot = other < slot ? other : slot;
      weight += ptx::shuffle_xor_f32(weight, mask);
    }
    fetched.live = slot < kMaxTopK && lane_ / 4 < tokens_.count;
    fetched.weight = weight;
    fetched.blocks = (params_.intermediate - item.unit * skinny::kUnitK) / kBlock;
    fetched.alpha = ptx::load_global_f32(params_.w2_alpha + expert);

    const int64_t row =
        static_cast<int64_t>(tokens_.first + column) * params_.top_k + (slot < kMaxTopK ? slot : 0);
    const uint8_t* codes = params_.workspace + row * code_row_bytes(params_.intermediate);
    const int last_byte = params_.intermediate / 2 - 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int byte = item.unit * skinny::kUnitRowBytes + 16 * i + 4 * (lane_ % 4);
      fetched.tokens.codes[i / 2][0].reg[i % 2] =
          ptx::load_global_u32(codes + (byte < last_byte ? byte : last_byte));
    }
    const int k_tile = item.unit * 2 + lane_ % 2;
    const int last_tile = scale_tiles_along_k(params_.intermediate) - 1;
    fetched.tokens.scales[0] =
        ptx::load_global_u32(activation_scales_ + row * scale_row_bytes(params_.intermediate) +
                             4 * (k_tile < last_tile ? k_tile : last_tile));
  }

 private:
  const KernelParams& params_;
  const TokenBlock& tokens_;
  int tile_, lane_, units_;
  int64_t scale_stride_;
  const uint8_t* activation_scales_;
};

/// Multiply an item and add it, weighted, to the columns that have its expert. The others are left alone:
/// their product is 0 only if no scale of the weights is NaN.
DEVICE_FN void add_item(Sums& totals, uint32_t stage, DownItem& item, int lane) {
  if (!item.live) item.tokens.scales[0] = 0;
  Sums sums = {};
  skinny::multiply_unit(sums, stage, item.tokens, item.blocks, lane);
  const uint32_t live = ptx::ballot(item.live);
  const float factor = item.weight * item.alpha;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int owner = 4 * (2 * (lane % 4) + i);  // the first lane of column 2 t + i
    const float scale = ptx::shuffle_f32(factor, owner);
    const bool counts = live >> owner & 1u;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& total = totals.tile[tile][0].reg[2 * half + i];
        total += counts ? scale * sums.tile[tile][0].reg[2 * half + i] : 0.0f;
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
  const DownStream<kAligned> stream(params, tokens, tile, lane);
  const ItemPlace step = stream.place(kWarps << shift);
  ItemPlace ahead = stream.place(rank * kWarps + thread / 32);  // the next whose tokens are fetched
  if (skinny::first_row(tile) >= params.hidden_size) ahead.index = tokens.experts;
  ItemPlace far_ahead = ahead;  // the next whose weights are
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stream.exists(far_ahead)) stream.load_weights(ring + stage * skinny::kUnitBytes, far_ahead);
    far_ahead = stream.after(far_ahead, step);
    ptx::cp_async_commit();
  }
  const Inbox inbox(base + kInbox, rank, shift, tokens.count);
  inbox.open(thread);
  ptx::launch_dependents();
  ptx::wait_for_dependencies();

  Sums totals = {};
  DownItem current;
  DownItem next;
  uint32_t stage = ring;
  bool more = stream.exists(ahead);
  if (more) stream.load_tokens(current, ahead);
  while (more) {
    ahead = stream.after(ahead, step);
    more = stream.exists(ahead);
    if (more) stream.load_tokens(next, ahead);
    ptx::cp_async_wait<kStages - 1>();
    ptx::sync_warp();  // the other lanes' copies have landed too
    add_item(totals, stage, current, lane);
    ptx::sync_warp();  // nobody reads this stage any more
    if (stream.exists(far_ahead)) stream.load_weights(stage, far_ahead);
    far_ahead = stream.after(far_ahead, step);
    ptx::cp_async_commit();  // also when empty: the wait above counts groups
    stage = stage == ring ? ring + skinny::kUnitBytes : ring;
    current = next;
  }
  const OutputWriter writer(params, tokens.first, tile);
  // The warp's own ring is free: its last stage has been multiplied.
  reduce(totals, base, kRingBytes, inbox, tokens.count, thread, writer);
}

}  // namespace sm120::moe
