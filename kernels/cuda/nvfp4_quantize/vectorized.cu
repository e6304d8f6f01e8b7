// One pass: 32 bytes a thread and load, kUnroll of them in flight; rows follow one another without
// a seam.
#include "vector.cuh"

namespace kernelcat {

template <typename T, bool kNvfp4, bool kRotated, bool kStochastic, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads, 1)
    nvfp4_quantize_vectorized(const T* x, const float* global_scale, const T* weight,
                              const float* signs, const uint32_t* seed, uint2* q, uint8_t* scale,
                              int m, int k) {
  constexpr int kLanes = kScaleLanes<kNvfp4>;
  const Options options = {signs, seed};
  const int64_t end = static_cast<int64_t>(m) * (k / kVector);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  Vector vectors[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (first + i * kThreads < end) vectors[i] = Vector::load_once(x, first + i * kThreads);
  }
  const Scaling<kNvfp4> scaling(global_scale);
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t index = first + i * kThreads;
    const Coded found =
        coded<T, kNvfp4, kRotated, kStochastic>(options, scaling, vectors[i], index);
    if (index >= end) continue;
    __stcs(q + index, found.codes);
    if (lane_index() % kLanes == 0) scale[index / kLanes] = found.scale;
  }
}

}  // namespace kernelcat
