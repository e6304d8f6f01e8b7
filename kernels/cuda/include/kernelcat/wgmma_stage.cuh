// A stage of a 16-bit product as wgmma reads it: rows of 128 bytes, swizzled.
#pragma once

#include <kernelcat/wgmma.cuh>

namespace kernelcat {

constexpr int BLOCK_K = kRowBytes / 2;

// sums += A @ B^T for kNumWgmmas * 64 rows of A, kCols rows of B and kDepth columns, or sums = ...
// without `accumulate`. Starts the wgmmas and commits them as one group.
template <typename T, int kCols, int kDepth = BLOCK_K, int kNumWgmmas>
__device__ __forceinline__ void multiply_stage(float (&sums)[kNumWgmmas][kCols / 2], uint64_t a,
                                               uint64_t b, bool accumulate) {
#pragma unroll
  for (int i = 0; i < kNumWgmmas; ++i) pin(sums[i]);
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
#pragma unroll
  for (int i = 0; i < kNumWgmmas; ++i) pin(sums[i]);
}

}  // namespace kernelcat
