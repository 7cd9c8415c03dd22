// Plain loads and stores. Shared memory is addressed by its 32-bit offset, as ldmatrix and cp.async want it.
// Activations are read with ld.global, never ld.global.nc: the kernel in front may still write them while
// this one has already started.
#pragma once

#include "target.cuh"

namespace sm120::ptx {

struct Float2 {
  float x, y;
};
struct Float4 {
  float x, y, z, w;
};
struct Word2 {
  uint32_t x, y;
};
struct Word4 {
  uint32_t x, y, z, w;
};

/// Start of the CTA's dynamic shared memory, aligned to 128 bytes.
DEVICE_FN uint32_t dynamic_shared_base() {
#if defined(SM120_EMULATED)
  return emu::dynamic_shared_base();
#elif defined(__CUDA_ARCH__)
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared));
#else
  return 0;
#endif
}

DEVICE_FN Word2 load_shared_u32x2(uint32_t address) {
  Word2 value;
#if defined(SM120_EMULATED)
  emu::load_shared(address, &value, sizeof(value));
#else
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
#endif
  return value;
}

DEVICE_FN Float2 load_shared_f32x2(uint32_t address) {
  Float2 value;
#if defined(SM120_EMULATED)
  emu::load_shared(address, &value, sizeof(value));
#else
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
#endif
  return value;
}

DEVICE_FN Word4 load_shared_u32x4(uint32_t address) {
  Word4 value;
#if defined(SM120_EMULATED)
  emu::load_shared(address, &value, sizeof(value));
#else
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
#endif
  return value;
}

DEVICE_FN Float4 load_shared_f32x4(uint32_t address) {
  Float4 value;
#if defined(SM120_EMULATED)
  emu::load_shared(address, &value, sizeof(value));
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
#endif
  return value;
}

DEVICE_FN void store_shared_f32x4(uint32_t address, const Float4& value) {
#if defined(SM120_EMULATED)
  emu::store_shared(address, &value, sizeof(value));
#else
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
#endif
}

DEVICE_FN void store_shared_f32(uint32_t address, float value) {
#if defined(SM120_EMULATED)
  emu::store_shared(address, &value, sizeof(value));
#else
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(address), "f"(value) : "memory");
#endif
}

DEVICE_FN uint32_t load_shared_u32(uint32_t address) {
  uint32_t value;
#if defined(SM120_EMULATED)
  emu::load_shared(address, &value, sizeof(value));
#else
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
#endif
  return value;
}

DEVICE_FN float load_shared_f32(uint32_t address) {
  float value;
#if defined(SM120_EMULATED)
  emu::load_shared(address, &value, sizeof(value));
#else
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(address) : "memory");
#endif
  return value;
}

DEVICE_FN void store_shared_u32(uint32_t address, uint32_t value) {
#if defined(SM120_EMULATED)
  emu::store_shared(address, &value, sizeof(value));
#else
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
#endif
}

DEVICE_FN void store_shared_u32x2(uint32_t address, uint32_t x, uint32_t y) {
#if defined(SM120_EMULATED)
  const uint32_t pair[2] = {x, y};
  emu::store_shared(address, pair, sizeof(pair));
#else
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(address), "r"(x), "r"(y) : "memory");
#endif
}

/// Set bits of a word of shared memory. Any number of threads may do so at once: the result does not depend
/// on their order.
DEVICE_FN void set_shared_bits(uint32_t address, uint32_t bits) {
#if defined(SM120_EMULATED)
  emu::set_shared_bits(address, bits);
#else
  asm volatile("red.shared.or.b32 [%0], %1;\n" ::"r"(address), "r"(bits) : "memory");
#endif
}

/// A load that reads the GPU's one coherent copy (L2), never a line that L1 kept from before.
DEVICE_FN uint32_t load_coherent_u32(const void* address) {
  uint32_t value;
#if defined(SM120_EMULATED)
  emu::load_global(address, &value, sizeof(value));
#else
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(address) : "memory");
#endif
  return value;
}

DEVICE_FN uint32_t load_global_u32(const void* address) {
  uint32_t value;
#if defined(SM120_EMULATED)
  emu::load_global(address, &value, sizeof(value));
#else
  asm volatile("ld.global.u32 %0, [%1];\n" : "=r"(value) : "l"(address) : "memory");
#endif
  return value;
}

/// The same, or 0 without touching memory.
DEVICE_FN uint32_t load_global_u32_if(bool wanted, const void* address) {
  uint32_t value = 0;
#if defined(SM120_EMULATED)
  if (wanted) emu::load_global(address, &value, sizeof(value));
#else
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }"
               : "+r"(value)
               : "l"(address), "r"(static_cast<uint32_t>(wanted))
               : "memory");
#endif
  return value;
}

DEVICE_FN float load_global_f32(const float* address) {
  float value;
#if defined(SM120_EMULATED)
  emu::load_global(address, &value, sizeof(value));
#else
  asm volatile("ld.global.f32 %0, [%1];\n" : "=f"(value) : "l"(address) : "memory");
#endif
  return value;
}

DEVICE_FN void store_global_u32(void* address, uint32_t value) {
#if defined(SM120_EMULATED)
  emu::store_global(address, &value, sizeof(value));
#else
  asm volatile("st.global.u32 [%0], %1;\n" ::"l"(address), "r"(value) : "memory");
#endif
}

DEVICE_FN void store_global_u32x2(void* address, uint32_t x, uint32_t y) {
#if defined(SM120_EMULATED)
  const uint32_t pair[2] = {x, y};
  emu::store_global(address, pair, sizeof(pair));
#else
  asm volatile("st.global.v2.u32 [%0], {%1, %2};\n" ::"l"(address), "r"(x), "r"(y) : "memory");
#endif
}

/// Store the low byte.
DEVICE_FN void store_global_u8(void* address, uint32_t value) {
#if defined(SM120_EMULATED)
  emu::store_global(address, &value, 1);  // little-endian: the low byte is the first
#else
  asm volatile("st.global.u8 [%0], %1;\n" ::"l"(address), "r"(value) : "memory");
#endif
}

DEVICE_FN Word4 load_global_u32x4(const void* address) {
  Word4 value;
#if defined(SM120_EMULATED)
  emu::load_global(address, &value, sizeof(value));
#else
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
#endif
  return value;
}

}  // namespace sm120::ptx
