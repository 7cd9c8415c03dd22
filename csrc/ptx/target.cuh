// Which of the three ways this translation unit is compiled for, and the words both compilers understand.
//
//   SM120_NATIVE    device code for compute capability 12.x: the block-scaled FP4 instruction itself
//   SM120_DECODED   device code for any other card from 8.0 up: the same registers, decoded to fp16 for HMMA
//   SM120_EMULATED  host code by any C++20 compiler: the thread block runs on the CPU (csrc/emulation)
//
// Only files in csrc/ptx may test these macros. Everything else is written once.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define DEVICE_FN __device__ __forceinline__
#define SHARED_FN __host__ __device__ __forceinline__
#define KERNEL_FN __global__
#define GRID_CONSTANT __grid_constant__
#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ < 800
#error "sglang-sm120 kernels need compute capability 8.0 or newer."
#elif __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300
#if !defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && !defined(__CUDA_ARCH_SPECIFIC__)
#error \
    "Plain sm_120/sm_121 has no FP4 tensor instruction: build for sm_120f (or sm_120a, sm_121a, sm_121f), CUDA 12.9 or newer."
#endif
#define SM120_NATIVE 1
#else
#define SM120_DECODED 1
#endif
#endif
#else
#define SM120_EMULATED 1
#define DEVICE_FN inline
#define SHARED_FN constexpr inline
#define KERNEL_FN inline
#define GRID_CONSTANT
#define __launch_bounds__(...)
#endif

#if defined(SM120_EMULATED)
#include "../emulation/instructions.h"
#endif
