// mma.sync m16n8k64 e2m1 x e2m1 with one ue4m3 scale per 16 elements of K: the only FP4 multiply of the
// package. PTX ISA, "mma with block scaling", .kind::mxf4nvf4 .scale_vec::4X.
//
// Registers of lane l, g = l / 4, t = l % 4; eight e2m1 codes a register, lowest nibble = lowest k:
//
//          k 0..31                  k 32..63                D (float32)
//   A  a0: row g    k 8t..8t+7   a2: row g    k 32+8t..   d0: (g,   2t)  d1: (g,   2t+1)
//      a1: row g+8  k 8t..8t+7   a3: row g+8  k 32+8t..   d2: (g+8, 2t)  d3: (g+8, 2t+1)
//   B  b0: column g k 8t..8t+7   b1: column g k 32+8t..
//
// Scales: one register a lane, byte j belongs to k 16j..16j+15. Which lanes of a quad are read is the
// selector:
//
//   scale_a  lane 4g + 2*kSelectA      -> row g         kSelectA in {0, 1}
//            lane 4g + 2*kSelectA + 1  -> row g+8
//   scale_b  lane 4g + kSelectB        -> column g      kSelectB in {0, 1, 2, 3}
//
// The other lanes' scale registers are ignored, so two k64 steps of A and four of B share one register a
// lane. Scale byte 0x7F is NaN and makes the row or column NaN. The top bit of a scale byte must be 0.
#pragma once

#include "target.cuh"

namespace sm120::ptx {

struct FragmentA {
  uint32_t reg[4];
};
struct FragmentB {
  uint32_t reg[2];
};
struct FragmentD {
  float reg[4];
};

}  // namespace sm120::ptx

#if defined(__CUDACC__)
#include "mma_nvfp4_decoded.cuh"
#endif

namespace sm120::ptx {

/// d += A * B with block scales; see the register tables at the top of this file.
template <int kSelectA, int kSelectB>
DEVICE_FN void mma_nvfp4(FragmentD& d, const FragmentA& a, const FragmentB& b, uint32_t scale_a,
                         uint32_t scale_b) {
  static_assert(kSelectA >= 0 && kSelectA < 2,
                "the instruction reads scale_a from lane pair 0 or 1 of a quad");
  static_assert(kSelectB >= 0 && kSelectB < 4,
                "the instruction reads scale_b from lane 0, 1, 2 or 3 of a quad");
#if defined(SM120_LOAD_PATH_ONLY)  // a build flag of benchmarks/gemm.py: what does feeding the multiply cost?
  const uint32_t mixed = a.reg[0] ^ a.reg[1] ^ a.reg[2] ^ a.reg[3] ^ b.reg[0] ^ b.reg[1] ^ scale_a ^ scale_b;
  d.reg[0] = __uint_as_float(__float_as_uint(d.reg[0]) ^ mixed);
#elif defined(SM120_NATIVE)
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, %12}, {%11}, {0, %13};\n"
      : "+f"(d.reg[0]), "+f"(d.reg[1]), "+f"(d.reg[2]), "+f"(d.reg[3])
      : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b.reg[0]), "r"(b.reg[1]),
        "r"(scale_a), "r"(scale_b), "n"(kSelectA), "n"(kSelectB));
#elif defined(SM120_EMULATED)
  emu::mma_nvfp4(d.reg, a.reg, b.reg, scale_a, scale_b, kSelectA, kSelectB);
#elif defined(SM120_DECODED)
  decoded::mma_nvfp4<kSelectA, kSelectB>(d, a, b, scale_a, scale_b);
#endif
}

}  // namespace sm120::ptx
