// The options of a quantizer: sums of squares for RMSNorm, the Hadamard transform, random bits; and
// the padding of swizzled scales.
#pragma once

#include <kernelcat/fp4.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

constexpr int kHadamard = 16;  // elements of a transform

// Philox-4x32-10 (Salmon et al., SC 2011): four random words for a key and a counter of two words.
__device__ __forceinline__ uint4 philox(uint32_t key0, uint32_t key1, uint64_t counter) {
  uint4 c = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c.x) * 0xd2511f53u;
    const uint64_t b = static_cast<uint64_t>(c.z) * 0xcd9e8d57u;
    c = {static_cast<uint32_t>(b >> 32) ^ c.y ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c.w ^ key1, static_cast<uint32_t>(a)};
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return c;
}

// One round of the transform: sums and differences of elements kStep apart. Rounds with steps of 1,
// 2, 4 and 8 make the whole transform.
template <int kStep, int kCount>
__device__ __forceinline__ void butterflies(float (&h)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i & kStep) continue;
    const float first = h[i], second = h[i + kStep];
    h[i] = __fadd_rn(first, second);
    h[i + kStep] = __fsub_rn(first, second);
  }
}

// The sum of 2^n values, added pairwise: adjacent values, then adjacent sums.
template <int kCount>
__device__ __forceinline__ float pairwise_sum(const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    float pairs[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) pairs[i] = __fadd_rn(values[2 * i], values[2 * i + 1]);
    return pairwise_sum(pairs);
  }
}

// The pairwise sum over the lanes whose numbers agree in the bits below kMinMask, by default over
// the whole warp; each of these lanes returns the sum.
template <int kMinMask = 1>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int mask = kMinMask; mask < kWarpThreads; mask *= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(0xffffffff, value, mask));
  }
  return value;
}

// The factor of RMSNorm for a row of k elements whose squares add up to `sum`.
__device__ __forceinline__ float inverse_rms(float sum, int k, float eps) {
  const float mean = __fadd_rn(__fdiv_rn(sum, static_cast<float>(k)), eps);
  return __frcp_rn(__fsqrt_rn(mean));
}

__device__ __forceinline__ int64_t padded(int64_t value, int step) {
  return ceil_div<int64_t>(value, step) * step;
}

// Stores zeros in the padding of the swizzled scales of m rows; called by `num_threads` threads, of
// which this one is number `thread`.
__device__ __forceinline__ void clear_padding(uint8_t* scale, int64_t m, int64_t num_cols,
                                              int64_t thread, int64_t num_threads) {
  const int64_t rows = padded(m, 128), cols = padded(num_cols, 4);
  const int64_t below = (rows - m) * cols, beside = m * (cols - num_cols);
  for (int64_t i = thread; i < below + beside; i += num_threads) {
    const bool is_below = i < below;
    const int64_t width = is_below ? cols : cols - num_cols, j = is_below ? i : i - below;
    const int64_t row = j / width + (is_below ? m : 0), col = j % width + (is_below ? 0 : num_cols);
    scale[scale_place<true>(row, col, num_cols)] = 0;
  }
}

}  // namespace kernelcat
