// One pass: 32 bytes a thread and load, two loads ahead; rows follow one another without a seam.
#include "vector.cuh"

namespace kernelcat {

constexpr int kAhead = 2;

template <typename T, bool kNvfp4, bool kRotated, bool kStochastic, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    nvfp4_quantize_vectorized(const T* x, const float* global_scale, const T* weight,
                              const float* signs, const uint32_t* seed, uint2* q, uint8_t* scale,
                              int m, int k) {
  constexpr int kLanes = kScaleLanes<kNvfp4>;
  const int64_t end = static_cast<int64_t>(m) * (k / kVector);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  const int rest = static_cast<int>(min(end - first, static_cast<int64_t>(kThreads * kUnroll)));
  const auto is_inside = [&](int i) { return i < kUnroll && i * kThreads < rest; };
  const T* from = x + first * kVector;
  uint2* to = q + first;
  uint8_t* scales = scale + first / kLanes;
  Vector next[kAhead] = {};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (is_inside(i)) next[i] = Vector::load_once(from, i * kThreads);
  }
  const Options<kRotated, kStochastic> options(signs, seed);
  const QuickScaling<kNvfp4, kRotated, kStochastic> scaling(global_scale);
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const Vector vector = next[i % kAhead];
    if (is_inside(i + kAhead)) {
      next[i % kAhead] = Vector::load_once(from, (i + kAhead) * kThreads);
    }
    const Coded found = coded<T>(options, scaling, vector, first + i * kThreads);
    if (!is_inside(i)) continue;
    __stcs(to + i * kThreads, found.codes);
    if (lane_index() % kLanes == 0) scales[i * (kThreads / kLanes)] = found.scale;
  }
}

}  // namespace kernelcat
