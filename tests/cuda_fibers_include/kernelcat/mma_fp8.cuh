// kernels/cuda/include/kernelcat/mma_fp8.cuh on the host.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/mma.cuh>

namespace kernelcat {

inline void mma_16x8x32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b_low,
                             uint32_t b_high) {
  multiply_fragments<float8_e4m3fn, 4>(d, a, b_low, b_high);
}

}  // namespace kernelcat
