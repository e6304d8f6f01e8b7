// The product of one stage of 16-bit operands: rows of 128 bytes, swizzled.
#pragma once

#include <kernelcat/wgmma.cuh>

namespace kernelcat {

constexpr int BLOCK_K = kRowBytes / 2;

// Starts sums = A @ B^T, with `accumulate` sums += A @ B^T, and commits its wgmmas as one group:
// kNumWgmmas * 64 rows of A, kCols rows of B, kDepth columns. `a` and `b` are matrix descriptors.
template <typename T, int kCols, int kDepth = BLOCK_K, int kNumWgmmas>
__device__ __forceinline__ void multiply_stage(float (&sums)[kNumWgmmas][kCols / 2], uint64_t a,
                                               uint64_t b, bool accumulate) {
  pin(sums);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / kWgmmaK; ++k) {
#pragma unroll
    for (int i = 0; i < kNumWgmmas; ++i) {
      Wgmma<T, kCols>::multiply(sums[i], advanced(a, i * kWgmmaM * kRowBytes + k * kWgmmaK * 2),
                                advanced(b, k * kWgmmaK * 2), accumulate || k > 0);
    }
  }
  wgmma_commit();
  pin(sums);
}

}  // namespace kernelcat
