// Thread block clusters and distributed shared memory (compute capability 9.0 and newer; elsewhere a cluster
// is one CTA, and the launcher never asks for more).
#pragma once

#include "target.cuh"

namespace sm120::ptx {

/// First half of the cluster barrier. It orders no memory: a releasing arrive costs a GPU-wide fence on
/// current compilers (MEMBAR.ALL.GPU in the SASS), and what peers must see here is only that this CTA runs
/// and that its mbarrier stands, for which publish_mbarrier is the light fence.
DEVICE_FN void cluster_arrive_relaxed() {
#if defined(SM120_EMULATED)
  emu::cluster_arrive_relaxed();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}

/// Second half: every thread of the cluster has arrived.
DEVICE_FN void cluster_wait() {
#if defined(SM120_EMULATED)
  emu::cluster_wait();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

/// An mbarrier whose only phase completes after one arrival and all bytes that arrival announces.
DEVICE_FN void mbarrier_init_and_expect(uint32_t barrier, uint32_t bytes) {
#if defined(SM120_EMULATED)
  emu::mbarrier_init_and_expect(barrier, bytes);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(barrier) : "memory");
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
      "r"(bytes)
      : "memory");
#else
  (void)barrier, (void)bytes;
#endif
}

/// Make the mbarrier visible to the cluster; before the initialising thread's cluster_arrive_relaxed.
DEVICE_FN void publish_mbarrier() {
#if defined(SM120_EMULATED)
  emu::publish_mbarrier();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}

/// Wait until the phase is complete; the data it counted is visible then.
DEVICE_FN void mbarrier_wait(uint32_t barrier) {
#if defined(SM120_EMULATED)
  emu::mbarrier_wait(barrier);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again; }" ::"r"(barrier)
      : "memory");
#else
  (void)barrier;
#endif
}

/// Store two floats at `address` in the shared memory of CTA `rank` and count 8 bytes on its mbarrier
/// `barrier`. The data and the count travel together, so the sender needs no fence and may exit.
DEVICE_FN void store_async_f32x2(uint32_t address, uint32_t barrier, uint32_t rank, float x, float y) {
#if defined(SM120_EMULATED)
  const float pair[2] = {x, y};
  emu::store_async(address, barrier, rank, pair, sizeof(pair));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 data, bar; mapa.shared::cluster.u32 data, %0, %2; mapa.shared::cluster.u32 bar, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [data], {%3, %4}, [bar]; }" ::"r"(
          address),
      "r"(barrier), "r"(rank), "f"(x), "f"(y)
      : "memory");
#else
  (void)address, (void)barrier, (void)rank, (void)x, (void)y;
#endif
}

}  // namespace sm120::ptx
