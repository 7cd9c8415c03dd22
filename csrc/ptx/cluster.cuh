// Thread block clusters and distributed shared memory (compute capability 9.0 and newer; elsewhere a cluster
// is one CTA, and the launcher never asks for more).
#pragma once

#include "target.cuh"

namespace sm120::ptx {

DEVICE_FN uint32_t cluster_rank() {
#if defined(SM120_EMULATED)
  return emu::cluster_rank();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

DEVICE_FN uint32_t cluster_size() {
#if defined(SM120_EMULATED)
  return emu::cluster_size();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

/// First half of the cluster barrier: publishes this thread's shared-memory writes, remote ones included.
DEVICE_FN void cluster_arrive() {
#if defined(SM120_EMULATED)
  emu::cluster_arrive();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}

/// Second half: every thread of the cluster has arrived and what it published is visible.
DEVICE_FN void cluster_wait() {
#if defined(SM120_EMULATED)
  emu::cluster_wait();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

/// Store two floats at `shared_address` in the shared memory of CTA `rank` of this cluster.
DEVICE_FN void store_cluster_f32x2(uint32_t shared_address, uint32_t rank, float x, float y) {
#if defined(SM120_EMULATED)
  const float pair[2] = {x, y};
  emu::store_cluster(shared_address, rank, pair, sizeof(pair));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; st.shared::cluster.v2.f32 [remote], {%2, "
      "%3}; }" ::"r"(shared_address),
      "r"(rank), "f"(x), "f"(y)
      : "memory");
#else
  (void)shared_address, (void)rank, (void)x, (void)y;
#endif
}

}  // namespace sm120::ptx
