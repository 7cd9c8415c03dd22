// Where a thread is, and the barriers of a warp and of a CTA.
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

DEVICE_FN int block_index() {
#if defined(SM120_EMULATED)
  return emu::block_index();
#elif defined(__CUDA_ARCH__)
  return static_cast<int>(blockIdx.x & 0x7FFFFFFFu);
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

}  // namespace sm120::ptx
