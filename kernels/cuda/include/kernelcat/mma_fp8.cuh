// Warp-wide products of e4m3 (sm_89+).
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// d += a @ b^T: a 16 x 32, b 8 x 32, d 16 x 8 float32.
__device__ __forceinline__ void mma_16x8x32_e4m3(float (&d)[4], const uint32_t (&a)[4],
                                                 uint32_t b_low, uint32_t b_high) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

}  // namespace kernelcat
