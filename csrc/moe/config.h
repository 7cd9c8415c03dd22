// Shapes of the two mixture-of-experts kernels: what is fixed, what a launch chooses, where things lie in
// shared memory and in the workspace. Plain C++.
#pragma once

#include <cstdint>

#include "../gemm_skinny/config.h"
#include "params.h"

namespace sm120::moe {

// Units of weights (32 rows x 128 k), their rings and the warps that share K are those of the skinny GEMM.
using skinny::kThreads;
using skinny::kWarps;

constexpr int kStages = skinny::kRingStages;
constexpr int kRingBytes = kStages * skinny::kUnitBytes;  // of one warp
constexpr int kColumns = 8;                               // tokens of one mma
constexpr int kBlock = 16;                                // elements that share a scale
constexpr int kMaxShared = 101376;                        // of a CTA on SM12x

constexpr int kMaxTopK = 32;
constexpr int kMaxPairs = 4096;  // m * top_k
/// Every CTA keeps a bit for each expert in shared memory.
constexpr int kMaxExperts = 8192;
/// A CTA keeps whole quantized rows of tokens in shared memory.
constexpr int kMaxHiddenSize = 12288;

/// What a launch chooses.
struct Config {
  int gate_up_shift;     // log2 of the CTAs that share K of a gate/up tile; 0 if an expert may have more
                         // tokens than gate_up_rows, or a CTA more tiles than one
  int gate_up_clusters;  // CTAs (or clusters) that share out the gate/up tiles of all experts with tokens
  int gate_up_rows;      // tokens of an expert that are worked off together
  int down_shift;        // log2 of the CTAs that share the experts of a down tile
};

struct KernelParams : Params {
  Config config;
};

constexpr int units_along(int k) {
  return skinny::units_along_k(k);
}

/// Bytes of a quantized activation's codes and of its scales: rows of the workspace, one for each (token,
/// slot).
constexpr int64_t code_row_bytes(int intermediate) {
  return intermediate / 2;
}
constexpr int64_t scale_row_bytes(int intermediate) {
  return (intermediate / kBlock + 3) / 4 * 4;
}
constexpr int64_t workspace_bytes(int m, int top_k, int intermediate) {
  return int64_t{1} * m * top_k * (code_row_bytes(intermediate) + scale_row_bytes(intermediate));
}

/// gate/up tiles of an expert: 16 gate and the 16 up rows that go with them, or 32 rows without a gate.
constexpr int gate_up_tiles(const Params& params) {
  return params.activation == Activation::kSilu ? params.intermediate / 16 : (params.intermediate + 31) / 32;
}
constexpr int w13_rows(const Params& params) {
  return params.activation == Activation::kSilu ? 2 * params.intermediate : params.intermediate;
}
/// Experts that may have tokens, as far as the host knows.
constexpr int active_experts(const Params& params) {
  const int pairs = params.m * params.top_k;
  return pairs < params.experts ? pairs : params.experts;
}
/// Blocks of tokens that the down kernel works off apart from each other.
constexpr int token_blocks(int m) {
  return (m + kColumns - 1) / kColumns;
}

// Shared memory of both kernels: rings, inbox (sums of cluster peers and their mbarrier), then what follows
// here.
constexpr int kInbox = kWarps * kRingBytes;
constexpr int kInboxBytes = skinny::kTileRows * kColumns * 4 + 16;
constexpr int kRouting = kInbox + kInboxBytes;

/// A column of partial sums (32 local rows) is 36 floats apart: lanes (g, t) of a store hit 32 banks.
constexpr int kPartialBytes = (skinny::kTileRows + 4) * 4;

/// gate/up: pairs' experts, one bit an expert, counts of the warps, tokens of the expert, the warps' partial
/// sums (apart from the rings, which hold the next tile by then), quantized rows of the tokens.
struct GateUpShared {
  int experts_of_pairs, active, counts, tokens, partials, rows, row_pitch, bytes;

  constexpr GateUpShared(const Params& params, int units, int rows_at_once)
      : experts_of_pairs(kRouting),
        active(experts_of_pairs + 4 * params.m * params.top_k),
        counts(active + (params.experts + 31) / 32 * 4),
        tokens(counts + 4 * kWarps),
        partials((tokens + 4 * params.m + 15) / 16 * 16),
        rows(partials + kWarps * rows_at_once * kPartialBytes),
        // Codes (64 bytes a unit), then scales (8); eight rows a multiple of 128 bytes plus 16 apart hit
        // every bank once.
        row_pitch((units * 72 + 127 - 16) / 128 * 128 + 16),
        bytes(rows + rows_at_once * row_pitch) {}
};

constexpr Params largest_problem() {
  Params params = {};
  params.m = kMaxPairs;
  params.top_k = 1;
  params.experts = kMaxExperts;
  params.hidden_size = kMaxHiddenSize;
  return params;
}
static_assert(GateUpShared(largest_problem(), units_along(kMaxHiddenSize), 1).bytes <= kMaxShared,
              "one token always fits");

/// down: experts and router weights of the block's pairs, the block's distinct experts, and for each of those
/// a word a column: which pair of the token has it.
constexpr int kMaxBlockPairs = kColumns * kMaxTopK;
static_assert(kMaxBlockPairs <= kThreads, "one thread a pair");
constexpr int kDownWeights = kRouting + 4 * kMaxBlockPairs;
constexpr int kDownList = kDownWeights + 4 * kMaxBlockPairs;
constexpr int kDownPairs = kDownList + 4 * kMaxBlockPairs;
constexpr int kDownSharedBytes = kDownPairs + 4 * kColumns * kMaxBlockPairs;

/// log2 of the CTAs that share the K (or the experts) of a tile: the rule of the skinny GEMM, for `tiles` of
/// them with `units` each.
constexpr int choose_shift(int64_t tiles, int units, int sm_count, int max_cluster) {
  int shift = 0;
  while (2 << shift <= max_cluster) {
    const int64_t doubled = int64_t{2} << shift;
    const bool one_per_sm = tiles * doubled <= sm_count && units >= doubled * (kWarps / 2);
    const bool two_per_sm = 2 * tiles * doubled <= 5 * sm_count && units >= doubled * kWarps * 2;
    if (!one_per_sm && !two_per_sm) break;
    ++shift;
  }
  return shift;
}

/// The same for the down kernel, which may split its tiles further so that SMs with one CTA more than others
/// do not decide: as long as the units that the busiest SM works off, one CTA behind the other, become fewer.
/// Routing a block and adding the sums take about as long as kRoutingUnits of a warp.
constexpr int kRoutingUnits = 3;
constexpr int choose_down_shift(int64_t tiles, int units, int sm_count, int max_cluster) {
  const auto cost = [=](int shift) {
    const int64_t ctas = ((tiles << shift) + sm_count - 1) / sm_count;
    return ctas * ((units + (kWarps << shift) - 1) / (kWarps << shift) + kRoutingUnits);
  };
  int shift = choose_shift(tiles, units, sm_count, max_cluster);
  while (2 << shift <= max_cluster && cost(shift + 1) < cost(shift)) ++shift;
  return shift;
}

/// Shared memory with which two CTAs fit on an SM12x SM.
constexpr int kHalfShared = 102400 / 2 - 1024;
/// gate/up: turns of CTAs, of which an SM holds two, where each CTA then still has so many tiles. An expert
/// with more tokens than are worked off together takes a multiple of the time, so one turn of equal shares
/// would end unevenly; up to eight tokens that is rare, and the work of a CTA for itself counts more.
constexpr int kTurns = 4;
constexpr int kTurnTilesFew = 16;
constexpr int kTurnTilesMany = 2;

/// Eight tokens at once, or as few as four if two CTAs then fit on an SM, or as many as fit at all.
constexpr int choose_rows(const Params& params) {
  const int units = units_along(params.hidden_size);
  const int most = params.m < kColumns ? params.m : kColumns;
  const int least = most < 4 ? most : 4;
  int rows = most;
  while (rows > least && GateUpShared(params, units, rows).bytes > kHalfShared) --rows;
  if (GateUpShared(params, units, rows).bytes <= kHalfShared) return rows;
  for (rows = most; rows > 1 && GateUpShared(params, units, rows).bytes > kMaxShared;) --rows;
  return rows;
}

/// gate/up: clusters where tiles are scarce. Otherwise as many CTAs as the card holds at once, or a few turns
/// of them, each with a share of all tiles: it asks topk_ids once, quantizes its tokens once an expert, and
/// the next tile's weights arrive while sums are added.
constexpr Config choose_config(const Params& params, int sm_count, int max_cluster) {
  const int64_t tiles = int64_t{1} * gate_up_tiles(params) * active_experts(params);
  Config config = {0, static_cast<int>(tiles), params.m < kColumns ? params.m : kColumns, 0};
  if (params.m <= kColumns) {
    config.gate_up_shift = choose_shift(tiles, units_along(params.hidden_size), sm_count, max_cluster);
  }
  if (config.gate_up_shift == 0) {
    config.gate_up_rows = choose_rows(params);
    const int64_t places = int64_t{2} * sm_count;
    const int64_t turns = tiles / (places * (params.m <= kColumns ? kTurnTilesFew : kTurnTilesMany));
    const int64_t ctas = places * (turns < 1 ? 1 : turns < kTurns ? turns : kTurns);
    config.gate_up_clusters = static_cast<int>(tiles < ctas ? tiles : ctas);
  }
  const int block_tokens = params.m < kColumns ? params.m : kColumns;
  const int block_pairs = block_tokens * params.top_k;  // mostly different experts
  config.down_shift = choose_down_shift(
      int64_t{1} * skinny::row_tiles(params.hidden_size) * token_blocks(params.m),
      (block_pairs < params.experts ? block_pairs : params.experts) * units_along(params.intermediate),
      sm_count, max_cluster);
  return config;
}

}  // namespace sm120::moe
