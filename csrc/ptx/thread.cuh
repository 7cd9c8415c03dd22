// Where a thread is, the barriers of a warp and of a CTA, and values handed from lane to lane.
#pragma once

#include "target.cuh"

namespace sm120::ptx {

DEVICE_FN int thread_index() {
#if defined(SM120_EMULATED)
  return emu::thread_index();
#elif defined(__CUDA_ARCH__)
  return static_cast<int>(threadIdx.x & 1023u);  // the mask tells the compiler that it is not negative
#else
  return 0;
#endif
}

/// Which warp of the CTA this is, known to the compiler as the same for all lanes.
DEVICE_FN int warp_index() {
#if defined(SM120_EMULATED)
  return emu::thread_index() / 32;
#elif defined(__CUDA_ARCH__)
  return __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x & 1023u) / 32, 0);
#else
  return 0;
#endif
}

DEVICE_FN int block_index() {
#if defined(SM120_EMULATED)
  return emu::block_index();
#elif defined(__CUDA_ARCH__)
  return static_cast<int>(blockIdx.x & 0x7FFFFFFFu);
#else
  return 0;
#endif
}

/// Values that block_index takes.
DEVICE_FN int grid_width() {
#if defined(SM120_EMULATED)
  return emu::grid_width();
#elif defined(__CUDA_ARCH__)
  return static_cast<int>(gridDim.x & 0x7FFFFFFFu);
#else
  return 0;
#endif
}

DEVICE_FN int block_index_y() {
#if defined(SM120_EMULATED)
  return emu::block_index_y();
#elif defined(__CUDA_ARCH__)
  return static_cast<int>(blockIdx.y & 0xFFFFu);
#else
  return 0;
#endif
}

DEVICE_FN int block_index_z() {
#if defined(SM120_EMULATED)
  return emu::block_index_z();
#elif defined(__CUDA_ARCH__)
  return static_cast<int>(blockIdx.z & 0xFFFFu);
#else
  return 0;
#endif
}

/// All lanes of the warp arrive; their earlier memory accesses are ordered before the later ones of every
/// lane.
DEVICE_FN void sync_warp() {
#if defined(SM120_EMULATED)
  emu::sync_warp();
#elif defined(__CUDA_ARCH__)
  __syncwarp();
#endif
}

DEVICE_FN void sync_block() {
#if defined(SM120_EMULATED)
  emu::sync_block();
#elif defined(__CUDA_ARCH__)
  __syncthreads();
#endif
}

/// `value` of the lane whose number differs in the bits of `mask`. All lanes of the warp must be here.
DEVICE_FN uint32_t shuffle_xor(uint32_t value, int mask) {
#if defined(SM120_EMULATED)
  return emu::shuffle_xor(value, mask);
#elif defined(__CUDA_ARCH__)
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
#else
  return 0;
#endif
}

/// `value` of lane `lane`. All lanes of the warp must be here.
DEVICE_FN uint32_t shuffle(uint32_t value, int lane) {
#if defined(SM120_EMULATED)
  return emu::shuffle(value, lane);
#elif defined(__CUDA_ARCH__)
  return __shfl_sync(0xFFFFFFFFu, value, lane);
#else
  return 0;
#endif
}

DEVICE_FN float shuffle_xor_f32(float value, int mask) {
#if defined(SM120_EMULATED)
  return emu::bits_to_float(emu::shuffle_xor(emu::float_to_bits(value), mask));
#elif defined(__CUDA_ARCH__)
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
#else
  return 0;
#endif
}

DEVICE_FN float shuffle_f32(float value, int lane) {
#if defined(SM120_EMULATED)
  return emu::bits_to_float(emu::shuffle(emu::float_to_bits(value), lane));
#elif defined(__CUDA_ARCH__)
  return __shfl_sync(0xFFFFFFFFu, value, lane);
#else
  return 0;
#endif
}

/// Bit l of the result: whether lane l passes true. All lanes of the warp must be here.
DEVICE_FN uint32_t ballot(bool flag) {
#if defined(SM120_EMULATED)
  return emu::ballot(flag);
#elif defined(__CUDA_ARCH__)
  return __ballot_sync(0xFFFFFFFFu, flag);
#else
  return 0;
#endif
}

/// How many bits are set.
DEVICE_FN int count_bits(uint32_t word) {
#if defined(SM120_EMULATED)
  return __builtin_popcount(word);
#elif defined(__CUDA_ARCH__)
  return __popc(word);
#else
  return 0;
#endif
}

/// Position of the lowest set bit; there must be one.
DEVICE_FN int lowest_bit(uint32_t word) {
#if defined(SM120_EMULATED)
  return __builtin_ctz(word);
#elif defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(word)) - 1;
#else
  return 0;
#endif
}

/// Four of the eight bytes of {high, low}, chosen by the nibbles of `selector`, its lowest nibble first; 0 is
/// the lowest byte of `low`.
DEVICE_FN uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(SM120_EMULATED)
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= (bytes >> (8 * (selector >> (4 * i) & 7u)) & 0xFFu) << (8 * i);
  return out;
#elif defined(__CUDA_ARCH__)
  return __byte_perm(low, high, selector);
#else
  return 0;
#endif
}

}  // namespace sm120::ptx
