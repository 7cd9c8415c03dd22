// The down kernel's part of the routing: which experts a block of eight tokens has, and which of them each
// token. Its weights wait for the list of experts, so that is made with the fewest steps: a bit an expert,
// then one thread a word of bits writes out the experts of its word. The table of tokens follows while the
// first weights are under way.
#pragma once

#include "routing.cuh"

namespace sm120::moe {

/// The tokens of a CTA and their experts, in shared memory.
struct TokenBlock {
  uint32_t experts_of_pairs, weights, list, pairs;
  uint32_t active;  // one bit an expert, in the inbox: until that is opened
  int first, count;
  int experts;  // distinct ones, in the list
};
static_assert(kMaxExperts / 8 <= skinny::kTileRows * kColumns * 4, "the bits fit in front of the mbarrier");
static_assert(kMaxExperts / 32 <= kThreads, "one thread a word of bits");

/// What says "no pair" in the table of pairs.
constexpr uint32_t kNoPair = 0xFFFFFFFFu;

DEVICE_FN uint32_t pair_entry(const TokenBlock& tokens, int index, int column) {
  return tokens.pairs + 4 * (kColumns * index + column);
}

/// Read the block's routing and list its distinct experts, lowest first; the table of pairs is empty.
DEVICE_FN TokenBlock route_block(const Params& params, uint32_t base, int block, int thread) {
  const int first = block * kColumns;
  const int left = params.m - first;
  TokenBlock tokens = {base + kRouting,
                       base + kDownWeights,
                       base + kDownList,
                       base + kDownPairs,
                       base + kInbox,
                       first,
                       left < kColumns ? left : kColumns,
                       0};
  const int pairs = tokens.count * params.top_k;
  const int pair = first * params.top_k + thread;
  const int words = (params.experts + 31) / 32;
  uint32_t expert = kNoExpert;
  uint32_t weight = 0;
  if (thread < pairs) {
    expert = local_expert(params, pair);
    weight = ptx::load_coherent_u32(params.topk_weights + pair);
  }
  if (thread < (words + 3) / 4 * 4) ptx::store_shared_u32(tokens.active + 4 * thread, 0);
  ptx::store_shared_u32(tokens.experts_of_pairs + 4 * thread, expert);
  ptx::store_shared_u32(tokens.weights + 4 * thread, weight);
  ptx::sync_block();
  if (expert != kNoExpert) ptx::set_shared_bits(tokens.active + expert / 32 * 4, 1u << expert % 32);
  ptx::sync_block();
  int before = 0;  // experts of the words in front of this thread's
  for (int word = 0; word < words; word += 4) {
    const ptx::Word4 four = ptx::load_shared_u32x4(tokens.active + 4 * word);
    const int counts[4] = {ptx::count_bits(four.x), ptx::count_bits(four.y), ptx::count_bits(four.z),
                           ptx::count_bits(four.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (word + i < thread) before += counts[i];
      tokens.experts += counts[i];
    }
  }
  if (thread < words) {
    uint32_t bits = ptx::load_shared_u32(tokens.active + 4 * thread);
    for (; bits != 0; bits &= bits - 1) {
      ptx::store_shared_u32(tokens.list + 4 * before++,
                            static_cast<uint32_t>(32 * thread + ptx::lowest_bit(bits)));
    }
  }
  for (int entry = thread; entry < tokens.experts * kColumns; entry += kThreads) {
    ptx::store_shared_u32(tokens.pairs + 4 * entry, kNoPair);
  }
  ptx::sync_block();
  return tokens;
}

/// Fill in for each expert of the block and each column the token's first pair that names it, so that no warp
/// has to look for it again. A token that names an expert twice has one activation, of the first slot, and
/// the sum of both weights, which goes to that pair. Complete for all threads after the next barrier.
DEVICE_FN void list_pairs(const Params& params, const TokenBlock& tokens, int thread) {
  if (thread >= tokens.count * params.top_k) return;
  const uint32_t expert = ptx::load_shared_u32(tokens.experts_of_pairs + 4 * thread);
  if (expert == kNoExpert) return;
  const int column = thread / params.top_k;
  bool is_first = true;
  float weight = 0.0f;
#pragma unroll 4
  for (int slot = 0; slot < params.top_k; ++slot) {
    const int pair = column * params.top_k + slot;
    if (ptx::load_shared_u32(tokens.experts_of_pairs + 4 * pair) != expert) continue;
    if (pair < thread) is_first = false;
    // Its own weight or one that nobody writes: only the first of several is written, by its own thread.
    if (pair >= thread) weight += ptx::load_shared_f32(tokens.weights + 4 * pair);
  }
  if (!is_first) return;
  const uint32_t own_word = ptx::load_shared_u32(tokens.active + expert / 32 * 4);
  int index = ptx::count_bits(own_word & ((1u << expert % 32) - 1));
  for (uint32_t word = 0; word < expert / 32; ++word) {
    index += ptx::count_bits(ptx::load_shared_u32(tokens.active + 4 * word));
  }
  ptx::store_shared_f32(tokens.weights + 4 * thread, weight);
  ptx::store_shared_u32(pair_entry(tokens, index, column), static_cast<uint32_t>(thread));
}

}  // namespace sm120::moe
