// ldmatrix: 8x8 matrices of 16-bit elements from shared memory into mma fragments. On packed e2m1 codes one
// such matrix is 8 rows x 16 bytes = 8 rows x 32 codes, and lane 4g + t receives bytes 4t..4t+3 of row g:
// exactly one fragment register of mma_nvfp4.
#pragma once

#include "mma_nvfp4.cuh"

namespace sm120::ptx {

/// Matrix i comes from the eight 16-byte rows whose addresses lanes 8i..8i+7 pass.
DEVICE_FN void ldmatrix_x4(FragmentA& fragment, uint32_t row_address) {
#if defined(SM120_EMULATED)
  emu::ldmatrix(fragment.reg, 4, row_address);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment.reg[0]), "=r"(fragment.reg[1]), "=r"(fragment.reg[2]), "=r"(fragment.reg[3])
               : "r"(row_address)
               : "memory");
#endif
}

/// The same for two B operands: matrices 0 and 1 are b0 and b1 of the first, 2 and 3 of the second.
DEVICE_FN void ldmatrix_x4(FragmentB& first, FragmentB& second, uint32_t row_address) {
  FragmentA both;
  ldmatrix_x4(both, row_address);
  first = {{both.reg[0], both.reg[1]}};
  second = {{both.reg[2], both.reg[3]}};
}

}  // namespace sm120::ptx
