// Warp-wide matrix instructions (sm_80+), and loads and stores of 8x8 matrices in their layout.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address)
               : "memory");
}

// The reverse of load_matrices (sm_90+). Two matrices need the addresses of lanes 0 to 15 only.
// With kTranspose the transpose of each matrix is stored: the two elements of a lane's word, which
// are adjacent in a row of the matrix, then go to adjacent rows in memory.
template <bool kTranspose = false>
__device__ __forceinline__ void store_matrices(uint32_t shared_address,
                                               const uint32_t (&matrices)[4]) {
  if constexpr (kTranspose) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address),
                 "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
  } else {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address),
        "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
        : "memory");
  }
}

template <bool kTranspose = false>
__device__ __forceinline__ void store_matrices(uint32_t shared_address,
                                               const uint32_t (&matrices)[2]) {
  if constexpr (kTranspose) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address),
        "r"(matrices[0]), "r"(matrices[1])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address),
                 "r"(matrices[0]), "r"(matrices[1])
                 : "memory");
  }
}

// d += a @ b^T: a 16 x 16, b 8 x 16, d 16 x 8 float32.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low,
                                            uint32_t b_high);

#define KERNELCAT_MMA(TYPE, NAME)                                                          \
  template <>                                                                              \
  __device__ __forceinline__ void mma_16x8x16<TYPE>(float (&d)[4], const uint32_t (&a)[4], \
                                                    uint32_t b_low, uint32_t b_high) {     \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                    \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"    \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));   \
  }
KERNELCAT_MMA(bfloat16, "bf16")
KERNELCAT_MMA(float16, "f16")
#undef KERNELCAT_MMA

}  // namespace kernelcat
