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

/// `columns` of the eight are wanted. `rings` is the first warp's ring.
template <typename Finish>
DEVICE_FN void reduce(const Sums& sums, uint32_t rings, const Inbox& inbox, int columns, int thread,
                      const Finish& finish) {
  constexpr int kPairs = Inbox::kPairs;
  static_assert(kPairs <= kThreads && kPairs % 32 == 0, "one pair a thread, in whole warps");
  inbox.wait_for_peers();
  skinny::store_partials(sums, rings + thread / 32 * kRingBytes, 0, thread % 32);
  ptx::sync_block();
  if (thread < kPairs) {
    const int column = thread / skinny::kPairsPerToken;
    const int pair = thread % skinny::kPairsPerToken;
    const ptx::Float2 sum =
        skinny::sum_in_order<kWarps>(rings + skinny::partial_offset(column, 2 * pair), kRingBytes, kWarps);
    if (inbox.alone()) {
      finish(column, pair, sum, column < columns);
    } else if (column < columns) {
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
