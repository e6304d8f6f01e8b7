// The transposing variant of load_matrices (mma.cuh).
#pragma once

#include <kernelcat/mma.cuh>

namespace kernelcat {

// Four 8x8 matrices of 16-bit elements, each transposed; lane l passes the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&matrices)[4],
                                                         uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address)
               : "memory");
}

}  // namespace kernelcat
