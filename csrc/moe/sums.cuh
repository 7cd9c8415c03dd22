// Adding the slices of K in an order that never changes (warps, then CTAs of the cluster), with the pieces of
// the skinny GEMM. What happens to a sum is the caller's: `finish(column, pair, sum, live)` gets two
// neighbouring local rows of one column (a token) and is called by whole warps, 16 lanes a column, so that it
// may exchange values between lanes.
#pragma once

#include "../gemm_skinny/reduce.cuh"
#include "config.h"

namespace sm120::moe {

using Sums = skinny::Accumulators<1>;
using Inbox = skinny::ClusterInbox<1>;
static_assert(skinny::kPairsPerToken == 16, "half a warp has a column");

SHARED_FN uint32_t partial_offset(int column, int local_row) {
  return static_cast<uint32_t>(column * kPartialBytes + local_row * 4);
}

/// Columns from `columns` on are nobody's.
DEVICE_FN void store_partials(const Sums& sums, uint32_t partials, int columns, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = 2 * (lane % 4) + i;
    if (column >= columns) continue;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store_shared_f32(partials + partial_offset(column, 8 * (tile + 2 * half) + lane / 4),
                              sums.tile[tile][0].reg[2 * half + i]);
      }
    }
  }
}

/// `columns` of the eight are wanted. The partial sums of a warp go to `partials` plus `pitch` times its
/// number, where nobody reads or writes any more.
template <typename Finish>
DEVICE_FN void reduce(const Sums& sums, uint32_t partials, uint32_t pitch, const Inbox& inbox, int columns,
                      int thread, const Finish& finish) {
  constexpr int kPairs = Inbox::kPairs;
  static_assert(kPairs <= kThreads && kPairs % 32 == 0, "one pair a thread, in whole warps");
  inbox.wait_for_peers();
  store_partials(sums, partials + thread / 32 * pitch, columns, thread % 32);
  ptx::sync_block();
  if (thread < (columns + 1) / 2 * 32) {  // whole warps, two columns each
    const int column = thread / skinny::kPairsPerToken;
    const int pair = thread % skinny::kPairsPerToken;
    const bool live = column < columns;
    const ptx::Float2 sum = skinny::sum_in_order<kWarps>(
        partials + partial_offset(live ? column : columns - 1, 2 * pair), pitch, kWarps);
    if (inbox.alone()) {
      finish(column, pair, sum, live);
    } else if (live) {
      inbox.push(thread, sum);
    }
  }
  if (inbox.alone() || inbox.live_pairs() == 0) return;
  inbox.wait_for_sums();
  const int live = inbox.live_pairs();  // a multiple of 16
  if (thread < (live + 31) / 32 * 32) {
    const int own = thread < live ? thread : live - 1;
    const ptx::Float2 sum =
        skinny::sum_in_order<skinny::kMaxCluster>(inbox.slot(0, own), inbox.rank_stride(), inbox.cluster());
    finish((inbox.first_pair() + thread) / skinny::kPairsPerToken, thread % skinny::kPairsPerToken, sum,
           thread < live);
  }
}

}  // namespace sm120::moe
