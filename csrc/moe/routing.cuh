// Which experts have tokens, and which tokens: every CTA finds out by itself from topk_ids, a few thousand
// numbers at most. Nothing is sorted, counted or waited for on the host.
//
// topk_ids and topk_weights are read with loads that L1 cannot answer. The down kernel reads them before its
// dependency wait; down.cuh says why that is allowed.
#pragma once

#include "../ptx/memory.cuh"
#include "../ptx/thread.cuh"
#include "config.h"

namespace sm120::moe {

constexpr uint32_t kNoExpert = 0xFFFFFFFFu;

/// A contiguous share of `total` things for one of `parts`. Sizes differ by one at most.
struct Share {
  int begin, end;
};

DEVICE_FN Share share_of(int total, int parts, int index) {
  const int each = total / parts;
  const int longer = total - each * parts;
  const int begin = index * each + (index < longer ? index : longer);
  return {begin, begin + each + (index < longer ? 1 : 0)};
}

/// Number of a pair's expert among those of this rank, or kNoExpert.
DEVICE_FN uint32_t local_expert(const Params& params, int pair) {
  const uint32_t id =
      ptx::load_coherent_u32(params.topk_ids + pair) - static_cast<uint32_t>(params.first_expert);
  return id < static_cast<uint32_t>(params.experts) ? id : kNoExpert;
}

/// Write the expert of every pair, and the set of them as bits; complete for all threads afterwards.
DEVICE_FN void mark_experts(const Params& params, uint32_t experts_of_pairs, uint32_t active, int thread) {
  for (int word = thread; word < (params.experts + 31) / 32; word += kThreads) {
    ptx::store_shared_u32(active + 4 * word, 0);
  }
  ptx::sync_block();
  constexpr int kAtOnce = 4;  // loads that overlap
  const int pairs = params.m * params.top_k;
  for (int first = thread; first < pairs; first += kAtOnce * kThreads) {
    uint32_t expert[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int pair = first + i * kThreads;
      expert[i] = pair < pairs ? local_expert(params, pair) : kNoExpert;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int pair = first + i * kThreads;
      if (pair < pairs) ptx::store_shared_u32(experts_of_pairs + 4 * pair, expert[i]);
      if (expert[i] != kNoExpert) ptx::set_shared_bits(active + expert[i] / 32 * 4, 1u << expert[i] % 32);
    }
  }
  ptx::sync_block();
}

/// How many experts have tokens.
DEVICE_FN int count_experts(const Params& params, uint32_t active) {
  int count = 0;
#pragma unroll 4
  for (int word = 0; word < (params.experts + 31) / 32; ++word) {
    count += ptx::count_bits(ptx::load_shared_u32(active + 4 * word));
  }
  return count;
}

/// The `index`-th expert that has tokens, or kNoExpert if there are fewer.
DEVICE_FN uint32_t nth_expert(const Params& params, uint32_t active, int index) {
  for (int word = 0; word < (params.experts + 31) / 32; ++word) {
    uint32_t bits = ptx::load_shared_u32(active + 4 * word);
    const int count = ptx::count_bits(bits);
    if (index < count) {
      for (; index > 0; --index) bits &= bits - 1;
      return static_cast<uint32_t>(32 * word + ptx::lowest_bit(bits));
    }
    index -= count;
  }
  return kNoExpert;
}

/// Where the CTA's threads with `flag` come in an order: their number before this thread, and how many there
/// are. `counts` is one word a warp.
struct Place {
  int before;
  int total;
};

DEVICE_FN Place place_among(bool flag, uint32_t counts, int thread) {
  const int lane = thread % 32;
  const uint32_t votes = ptx::ballot(flag);
  if (lane == 0)
    ptx::store_shared_u32(counts + thread / 32 * 4, static_cast<uint32_t>(ptx::count_bits(votes)));
  ptx::sync_block();
  Place place = {ptx::count_bits(votes & ((1u << lane) - 1u)), 0};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const int count = static_cast<int>(ptx::load_shared_u32(counts + 4 * warp));
    if (warp < thread / 32) place.before += count;
    place.total += count;
  }
  return place;
}

/// List the tokens of `expert` in their order, each once: as the pair of its first slot that names the
/// expert. Returns how many there are; the list is complete for all threads afterwards.
DEVICE_FN int list_tokens(const Params& params, const GateUpShared& shared, uint32_t base, uint32_t expert,
                          int thread) {
  int found = 0;
  for (int first = 0; first < params.m; first += kThreads) {
    const int token = first + thread;
    int pair = -1;
#pragma unroll 4
    for (int slot = params.top_k - 1; slot >= 0 && token < params.m; --slot) {
      const int candidate = token * params.top_k + slot;
      if (ptx::load_shared_u32(base + shared.experts_of_pairs + 4 * candidate) == expert) pair = candidate;
    }
    const Place place = place_among(pair >= 0, base + shared.counts, thread);
    if (pair >= 0) {
      ptx::store_shared_u32(base + shared.tokens + 4 * (found + place.before), static_cast<uint32_t>(pair));
    }
    found += place.total;
    ptx::sync_block();
  }
  return found;
}

}  // namespace sm120::moe
