// The matrix as one long row of words of eight codes: a thread has kUnroll words in flight, and
// stores 16 or 32 bytes for each.
#include <kernelcat/fp4.cuh>

#include "convert.cuh"

namespace kernelcat {

constexpr int kNumThreads = 256;

template <typename T>
__device__ __forceinline__ void store_values(T* x, const float (&values)[kWordCodes]) {
  if constexpr (sizeof(T) == 4) {
    float4* target = reinterpret_cast<float4*>(x);
    __stcs(target, float4{values[0], values[1], values[2], values[3]});
    __stcs(target + 1, float4{values[4], values[5], values[6], values[7]});
  } else {
    __stcs(reinterpret_cast<uint4*>(x),
           uint4{pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
                 pack<T>(values[4], values[5]), pack<T>(values[6], values[7])});
  }
}

template <typename T, bool kNvfp4, bool kSwizzled, int kUnroll>
__global__ void __launch_bounds__(kNumThreads)
    nvfp4_dequantize_vectorized(const uint32_t* q,     // (m, k / 8) words of eight codes
                                const uint8_t* scale,  // (m, k / 16 or 32); padded with kSwizzled
                                const float* global_scale,  // (1,), not read for MXFP4
                                T* x,                       // (m, k)
                                int m, int k) {
  constexpr int kBlockWords = kFp4Block<kNvfp4> / kWordCodes;
  const int num_blocks = k / kFp4Block<kNvfp4>, row_words = k / kWordCodes;
  const int64_t end = static_cast<int64_t>(m) * row_words;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kNumThreads * kUnroll) + threadIdx.x;
  int64_t row = 0;
  int col = 0;  // in words
  if constexpr (kSwizzled) {
    row = first / row_words;
    col = static_cast<int>(first - row * row_words);
  }
  uint32_t words[kUnroll] = {}, scales[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t word = first + i * kNumThreads;
    if (word < end) {
      words[i] = __ldcs(q + word);
      scales[i] = scale[kSwizzled ? scale_place<true>(row, col / kBlockWords, num_blocks)
                                  : word / kBlockWords];
    }
    if constexpr (kSwizzled) {
      col += kNumThreads;
      while (col >= row_words) {
        col -= row_words;
        ++row;
      }
    }
  }
  float global = 1.0f;
  if constexpr (kNvfp4) global = *global_scale;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t word = first + i * kNumThreads;
    if (word >= end) return;
    const float factor = scale_value<kNvfp4>(scales[i]);
    float values[kWordCodes];
#pragma unroll
    for (int j = 0; j < kWordCodes; ++j) {
      values[j] = __fmul_rn(code_value(words[i], j), factor);
      if constexpr (kNvfp4) values[j] = __fmul_rn(values[j], global);
    }
    store_values(x + word * kWordCodes, values);
  }
}

}  // namespace kernelcat
