// The part of the CUDA runtime that the launchers of csrc/ use, for the CPU: a launch runs the kernel to its
// end in the emulated thread block. Names and types are the runtime's; the device answers like an RTX 5090.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulation/machine.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrClusterLaunch };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
using cudaStream_t = struct cudaStream*;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  // Few SMs: the small layers of tests then reach both kernels beyond 64 tokens, and clusters.
  *value = attribute == cudaDevAttrMultiProcessorCount ? 8 : 1;
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  constexpr int kOptInLimit = 101376;
  return bytes <= kOptInLimit ? cudaSuccess : cudaErrorInvalidValue;
}

/// Called behind each launch, if set: what one kernel writes, a later one may read.
inline void (*after_launch)() = nullptr;

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* launch, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  if (launch->gridDim.x == 0 || launch->gridDim.y == 0) return cudaErrorInvalidConfiguration;
  int cluster = 1;
  for (unsigned i = 0; i < launch->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = launch->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      cluster = static_cast<int>(attribute.val.clusterDim.x);
    }
  }
  const emu::LaunchShape shape = {static_cast<int>(launch->gridDim.x),
                                  static_cast<int>(launch->gridDim.y),
                                  cluster,
                                  static_cast<int>(launch->blockDim.x),
                                  static_cast<uint32_t>(launch->dynamicSmemBytes),
                                  /*seed=*/1};
  emu::launch(shape, [&] { kernel(arguments...); });
  if (after_launch != nullptr) after_launch();
  return cudaSuccess;
}
