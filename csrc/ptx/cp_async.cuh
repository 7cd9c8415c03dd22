// cp.async: global to shared memory without registers. Groups complete in order, per thread.
#pragma once

#include "target.cuh"

namespace sm120::ptx {

/// L2 eviction policy for data that is read once, so that it does not push the activations out.
DEVICE_FN uint64_t policy_evict_first() {
#if defined(SM120_EMULATED)
  return 0;
#else
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#endif
}

/// Copy the first `bytes` (0, 8 or 16) of 16 and write zeros for the rest. Both addresses are 16-byte
/// aligned. .cg: past L1, the data is used once; L2::128B: the other half of the line is the next warp's
/// unit.
DEVICE_FN void cp_async_16(uint32_t shared_address, const void* source, int bytes, uint64_t policy) {
#if defined(SM120_EMULATED)
  emu::cp_async(shared_address, source, bytes, 16);
  (void)policy;
#else
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;\n" ::"r"(shared_address),
      "l"(source), "r"(bytes), "l"(policy)
      : "memory");
#endif
}

/// The same for data that other CTAs read too: it stays in L2 as usual.
DEVICE_FN void cp_async_16(uint32_t shared_address, const void* source, int bytes) {
#if defined(SM120_EMULATED)
  emu::cp_async(shared_address, source, bytes, 16);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address), "l"(source),
               "r"(bytes)
               : "memory");
#endif
}

/// Copy the first `bytes` (0 or 8) of 8, for sources that are only 8-byte aligned.
DEVICE_FN void cp_async_8(uint32_t shared_address, const void* source, int bytes) {
#if defined(SM120_EMULATED)
  emu::cp_async(shared_address, source, bytes, 8);
#else
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;\n" ::"r"(shared_address), "l"(source),
               "r"(bytes)
               : "memory");
#endif
}

/// Copy the first `bytes` (0 or 4) of 4: block scales of one row.
DEVICE_FN void cp_async_4(uint32_t shared_address, const void* source, int bytes) {
#if defined(SM120_EMULATED)
  emu::cp_async(shared_address, source, bytes, 4);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address), "l"(source), "r"(bytes)
               : "memory");
#endif
}

DEVICE_FN void cp_async_commit() {
#if defined(SM120_EMULATED)
  emu::cp_async_commit();
#else
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

/// Wait until at most the kPending youngest groups of this thread are still in flight.
template <int kPending>
DEVICE_FN void cp_async_wait() {
#if defined(SM120_EMULATED)
  emu::cp_async_wait(kPending);
#else
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
#endif
}

}  // namespace sm120::ptx
