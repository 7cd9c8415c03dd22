// griddepcontrol: programmatic dependent launch. A kernel launched with the attribute may start before the
// one in front of it has finished; until `wait` returns it may read only what that kernel does not write.
// Before compute capability 9.0 the attribute does not exist and both are nothing.
#pragma once

#include "target.cuh"

namespace sm120::ptx {

/// Let the next kernel of the stream start as soon as every CTA of this grid has said so.
DEVICE_FN void launch_dependents() {
#if defined(SM120_EMULATED)
  emu::launch_dependents();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

/// Wait until the kernels this one depends on have finished and their writes are visible.
DEVICE_FN void wait_for_dependencies() {
#if defined(SM120_EMULATED)
  emu::wait_for_dependencies();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

}  // namespace sm120::ptx
