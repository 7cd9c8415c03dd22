// Adding the slices of K, in an order that never changes: warps 0..7 inside a CTA, then CTAs 0..cluster-1.
//
//   accumulators -> own ring (free by then) -> sum over warps -> [cluster: push to the owner] -> owner sums
//   -> output
//
// Pushing to the owner's shared memory needs one cluster barrier; pulling would need a second before anyone
// may exit. Nothing goes through global memory: no workspace, no tickets, nothing to reset, graphs and
// streams need no care.
#pragma once

#include "cluster_inbox.cuh"
#include "epilogue.cuh"
#include "mainloop.cuh"

namespace sm120::skinny {

// A row of partial sums (one token, 32 local rows) is 36 floats apart: lanes (g, t) of a store hit 32 banks.
constexpr int kPartialPitch = kTileRows + 4;

template <int kTokenTiles>
struct ReducePlan {
  static constexpr int kTilesPerPass = kTokenTiles < 4 ? kTokenTiles : 4;  // what fits in the smallest ring
  static constexpr int kPasses = kTokenTiles / kTilesPerPass;
  static constexpr int kPairsPerPass = 8 * kTilesPerPass * kPairsPerToken;
  static_assert(8 * kTilesPerPass * kPartialPitch * 4 <= 2 * kUnitBytes,
                "partials must fit in a ring of 2 stages");
};

SHARED_FN uint32_t partial_offset(int token, int local_row) {
  return static_cast<uint32_t>((token * kPartialPitch + local_row) * 4);
}

template <int kTokenTiles>
DEVICE_FN void store_partials(const Accumulators<kTokenTiles>& sums, uint32_t ring, int pass, int lane) {
  constexpr int kTiles = ReducePlan<kTokenTiles>::kTilesPerPass;
#pragma unroll
  for (int column = 0; column < kTokenTiles; ++column) {
    if (column / kTiles != pass) continue;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * (column % kTiles) + 2 * (lane % 4) + i % 2;
        const int local_row = 8 * (tile + 2 * (i / 2)) + lane / 4;
        ptx::store_shared_f32(ring + partial_offset(token, local_row), sums.tile[tile][column].reg[i]);
      }
    }
  }
}

/// Sum of `count` (at most kMost) pairs `stride` bytes apart, first to last.
template <int kMost>
DEVICE_FN ptx::Float2 sum_in_order(uint32_t address, uint32_t stride, int count) {
  ptx::Float2 sum = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i >= count) break;
    const ptx::Float2 part = ptx::load_shared_f32x2(address + i * stride);
    sum.x += part.x;
    sum.y += part.y;
  }
  return sum;
}

/// Reduce over warps and cluster and write the outputs. `rings` is the first warp's ring.
template <int kTokenTiles, int kStages>
DEVICE_FN void reduce_and_store(const Accumulators<kTokenTiles>& sums, const Epilogue& epilogue,
                                uint32_t rings, const ClusterInbox<kTokenTiles>& inbox, int m) {
  using Plan = ReducePlan<kTokenTiles>;
  constexpr uint32_t kRingBytes = kStages * kUnitBytes;
  const int thread = ptx::thread_index();
  inbox.wait_for_peers();
#pragma unroll
  for (int pass = 0; pass < Plan::kPasses; ++pass) {
    if (pass > 0) ptx::sync_block();  // the sums of the last pass have been read
    store_partials(sums, rings + thread / 32 * kRingBytes, pass, thread % 32);
    ptx::sync_block();
    for (int pair = thread; pair < Plan::kPairsPerPass; pair += kThreads) {
      const int token = pair / kPairsPerToken;
      const int global_pair = pass * Plan::kPairsPerPass + pair;
      if (global_pair / kPairsPerToken >= m) continue;
      const uint32_t offset = partial_offset(token, 2 * (pair % kPairsPerToken));
      const ptx::Float2 sum = sum_in_order<kWarps>(rings + offset, kRingBytes, kWarps);
      if (inbox.alone()) {
        epilogue.store(global_pair / kPairsPerToken, sum);
      } else {
        inbox.push(global_pair, sum);
      }
    }
  }
  if (inbox.alone() || inbox.live_pairs() == 0) return;
  inbox.wait_for_sums();
  for (int pair = thread; pair < inbox.live_pairs(); pair += kThreads) {
    epilogue.store(inbox.first_pair() / kPairsPerToken + pair / kPairsPerToken,
                   sum_in_order<kMaxCluster>(inbox.slot(0, pair), inbox.rank_stride(), inbox.cluster()));
  }
}

}  // namespace sm120::skinny
