// The FP4 multiply on cards without the instruction: decode e2m1 x ue4m3 to fp16, then four HMMA m16n8k16.
//
// Every product e2m1 * ue4m3 is exact in fp16, so only the order of the float32 sums differs from the
// instruction. A code decodes by moving bits: sign to bit 15, the three magnitude bits to 11..9, which reads
// as value * 2^-14. The scale is multiplied by 2^7 (<= 448 * 128, still finite), so each operand holds value
// * scale * 2^-7 exactly (a multiple of 2^-17 with at most six significant bits), and one multiply by 2^14 a
// k64 step restores the sum. Without that factor operands below 2^-14 would be exact too, but the tensor
// cores of sm_90 were seen to keep fewer bits of a sum of subnormal numbers. The order of k inside a step is
// free as long as A and B agree; pairs (j, j+4) of a register are what masks yield.
#pragma once

#if defined(SM120_DECODED)
#include <cuda_fp16.h>

namespace sm120::ptx::decoded {

// Neither this nor the HMMA below is `volatile`: they depend on their operands alone, so the compiler may
// interleave independent multiplies and decode a B operand once for several of them.
DEVICE_FN uint32_t from_lane(uint32_t value, int lane) {
  uint32_t result;
  asm("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value), "r"(lane));
  return result;
}

struct ScalePair {
  __half2 low;   // of the k 0..31 register (a0, a1 or b0), in both halves
  __half2 high;  // of the k 32..63 register
};

/// Of the scale words of two rows or columns the bytes that this lane's registers need, t/2 and 2 + t/2:
/// those of the first in the lower half.
DEVICE_FN uint32_t needed_scales(uint32_t first, uint32_t second, int t) {
  return __byte_perm(first, second, t < 2 ? 0x6420 : 0x7531) & 0x7F7F7F7Fu;
}

/// The two scales in the lower half of `bytes`, times 2^7.
DEVICE_FN ScalePair decode_scales(uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("{ .reg .b16 pair; cvt.u16.u32 pair, %1; cvt.rn.f16x2.e4m3x2 %0, pair; }" : "=r"(halves) : "r"(bytes));
  const __half2 both = __hmul2(*reinterpret_cast<__half2*>(&halves), __float2half2_rn(128.f));
#else
  uint32_t halves =
      ((bytes & 0x7Fu) << 7) | ((bytes & 0x7F00u) << 15);  // value * 2^-8: exponent bias 15 against 7
  __half2 both = __hmul2(*reinterpret_cast<__half2*>(&halves), __float2half2_rn(32768.f));
  if ((bytes & 0x7Fu) == 0x7Fu) both.x = __ushort_as_half(0x7FFF);
  if ((bytes & 0x7F00u) == 0x7F00u) both.y = __ushort_as_half(0x7FFF);
#endif
  return {__low2half2(both), __high2half2(both)};
}

struct Decoded {
  uint32_t pair[4];  // codes (0,4), (1,5), (2,6), (3,7) of one register, times their scale, as half2
};

DEVICE_FN uint32_t scaled(uint32_t bits, __half2 scale) {
  const __half2 value = __hmul2(*reinterpret_cast<__half2*>(&bits), scale);
  return *reinterpret_cast<const uint32_t*>(&value);
}

/// The top bit of each byte from `signs`, the others from `rest`, in one instruction.
DEVICE_FN uint32_t join_signs(uint32_t signs, uint32_t rest) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, 0x80808080, 0xE4;" : "=r"(result) : "r"(signs), "r"(rest));
  return result;
}

/// The low byte of an fp16 code is zero, so four codes are first moved to the bits that they have in the high
/// byte, among bits of their neighbours, and the bytes then spread over registers and cleaned: 11
/// instructions and 4 multiplies for 8 codes. Seven of the 11 are logic; the left shifts are multiplies to
/// the machine, whose pipe has room.
DEVICE_FN Decoded decode_codes(uint32_t codes, __half2 scale) {
  constexpr uint32_t kBits = 0x8E008E00u;                    // of a code in its half
  const uint32_t even = join_signs(codes << 4, codes << 1);  // codes 0, 2, 4, 6
  const uint32_t odd = join_signs(codes, codes >> 3);        // codes 1, 3, 5, 7
  return {{scaled((even << 8) & kBits, scale), scaled((odd << 8) & kBits, scale), scaled(even & kBits, scale),
           scaled(odd & kBits, scale)}};
}

DEVICE_FN void hmma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int kSelectA, int kSelectB>
DEVICE_FN void mma_nvfp4(FragmentD& d, const FragmentA& a, const FragmentB& b, uint32_t scale_a,
                         uint32_t scale_b) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  const int quad = lane & ~3;
  const int t = lane & 3;
  const uint32_t rows =
      needed_scales(from_lane(scale_a, quad + 2 * kSelectA), from_lane(scale_a, quad + 2 * kSelectA + 1), t);
  const ScalePair row_lo = decode_scales(rows);
  const ScalePair row_hi = decode_scales(rows >> 16);
  const ScalePair column = decode_scales(needed_scales(from_lane(scale_b, quad + kSelectB), 0u, t));
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Decoded lo = decode_codes(a.reg[2 * half], half ? row_lo.high : row_lo.low);
    const Decoded hi = decode_codes(a.reg[2 * half + 1], half ? row_hi.high : row_hi.low);
    const Decoded col = decode_codes(b.reg[half], half ? column.high : column.low);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      hmma_m16n8k16(sum, lo.pair[i], hi.pair[i], lo.pair[i + 1], hi.pair[i + 1], col.pair[i],
                    col.pair[i + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) d.reg[i] = __fmaf_rn(sum[i], 16384.f, d.reg[i]);
}

}  // namespace sm120::ptx::decoded
#endif
