// Where the CTAs of a cluster leave their sums for each other. The outputs of a row tile (pairs of
// neighbouring columns, token by token) are dealt out in equal runs; the CTA that owns a run receives it from
// every peer, itself included:
//
//   inbox of rank r:  [source rank 0: pairs of r's run][source rank 1: the same pairs] ...    and one
//   mbarrier
//
// Data and its count on the owner's mbarrier travel in one store, so nothing is fenced and only owners wait.
#pragma once

#include "../ptx/cluster.cuh"
#include "../ptx/memory.cuh"
#include "config.h"

namespace sm120::skinny {

constexpr int kPairsPerToken = kTileRows / 2;

template <int kTokenTiles>
class ClusterInbox {
 public:
  static constexpr int kPairs = 8 * kTokenTiles * kPairsPerToken;
  static constexpr int kLog2Pairs = kTokenTiles == 1 ? 7 : kTokenTiles == 2 ? 8 : kTokenTiles == 4 ? 9 : 10;
  static_assert(1 << kLog2Pairs == kPairs, "pairs are dealt out by shifting");

  DEVICE_FN ClusterInbox(uint32_t memory, int rank, int cluster_shift, int m)
      : sums_(memory),
        mbarrier_(memory + kPairs * 8),
        rank_(rank),
        shift_(cluster_shift),
        run_(kPairs >> cluster_shift) {
    const int live = m * kPairsPerToken - rank * run_;
    live_ = live < 0 ? 0 : live < run_ ? live : run_;
  }

  /// Announce this CTA to its peers; the answer is awaited just before the first push.
  DEVICE_FN void open(int thread) const {
    if (alone()) return;
    if (thread == 0) {
      ptx::mbarrier_init_and_expect(mbarrier_, static_cast<uint32_t>((live_ * 8) << shift_));
      ptx::publish_mbarrier();
    }
    ptx::cluster_arrive_relaxed();
  }

  /// Every peer runs and its mbarrier stands.
  DEVICE_FN void wait_for_peers() const {
    if (!alone()) ptx::cluster_wait();
  }

  DEVICE_FN void push(int pair, const ptx::Float2& sum) const {
    ptx::store_async_f32x2(slot(rank_, pair & (run_ - 1)), mbarrier_, pair >> (kLog2Pairs - shift_), sum.x,
                           sum.y);
  }

  /// All peers' sums have arrived. Only for a CTA with live pairs.
  DEVICE_FN void wait_for_sums() const { ptx::mbarrier_wait(mbarrier_); }

  DEVICE_FN uint32_t slot(int source, int pair) const { return sums_ + (source * run_ + pair) * 8; }
  DEVICE_FN uint32_t rank_stride() const { return run_ * 8; }
  DEVICE_FN bool alone() const { return shift_ == 0; }
  DEVICE_FN int cluster() const { return 1 << shift_; }
  DEVICE_FN int first_pair() const { return rank_ * run_; }
  /// Pairs of this CTA's run that belong to a token below m.
  DEVICE_FN int live_pairs() const { return live_; }

 private:
  uint32_t sums_, mbarrier_;
  int rank_, shift_, run_, live_;
};

}  // namespace sm120::skinny
