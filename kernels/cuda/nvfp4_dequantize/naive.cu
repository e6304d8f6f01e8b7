// A thread for each block of scales, value by value.
#include <kernelcat/fp4.cuh>

#include "convert.cuh"

namespace kernelcat {

template <typename T, bool kNvfp4, bool kSwizzled>
__global__ void __launch_bounds__(256)
    nvfp4_dequantize_naive(const uint32_t* q,          // (m, k / 8) words of eight codes
                           const uint8_t* scale,       // (m, k / 16 or 32); padded with kSwizzled
                           const float* global_scale,  // (1,), not read for MXFP4
                           T* x,                       // (m, k)
                           int m, int k) {
  constexpr int kSize = kFp4Block<kNvfp4>, kBlockWords = kSize / kWordCodes;
  const int num_blocks = k / kSize;
  const int64_t end = static_cast<int64_t>(m) * num_blocks;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < end;
       i += step) {
    const int64_t place = scale_place<kSwizzled>(i / num_blocks, i % num_blocks, num_blocks);
    const float factor = scale_value<kNvfp4>(scale[place]);
    for (int j = 0; j < kSize; ++j) {
      float value =
          __fmul_rn(code_value(q[i * kBlockWords + j / kWordCodes], j % kWordCodes), factor);
      if constexpr (kNvfp4) value = __fmul_rn(value, *global_scale);
      x[i * kSize + j] = converted<T>(value);
    }
  }
}

}  // namespace kernelcat
