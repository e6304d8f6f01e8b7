// One pass over x as one long row of vectors of 32 bytes: a thread has kUnroll of them, and loads
// two vectors ahead of the one that it quantizes.
#include "vector.cuh"

namespace kernelcat {

constexpr int kAhead = 2;  // vectors

template <typename T, bool kNvfp4, bool kRotated, bool kStochastic, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    nvfp4_quantize_vectorized(const T* x,                 // (m, k)
                              const float* global_scale,  // (1,), not read for MXFP4
                              const T* weight,            // (k,), not read
                              const float* signs,         // (16,), read with kRotated
                              const uint32_t* seed,       // (2,), read with kStochastic
                              uint2* q,                   // (m, k / 16) vectors of 16 codes
                              uint8_t* scale,             // (m, k / 16 or 32)
                              int m, int k) {
  constexpr int kLanes = kScaleLanes<kNvfp4>;
  const int64_t end = static_cast<int64_t>(m) * (k / kVector);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  const int vectors_left =
      static_cast<int>(min(end - first, static_cast<int64_t>(kThreads * kUnroll)));
  const auto is_inside = [&](int i) { return i < kUnroll && i * kThreads < vectors_left; };
  const T* thread_x = x + first * kVector;
  uint2* thread_q = q + first;
  uint8_t* thread_scale = scale + first / kLanes;
  Vector next[kAhead] = {};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (is_inside(i)) next[i] = Vector::load_once(thread_x, i * kThreads);
  }
  const Options<kRotated, kStochastic> options(signs, seed);
  const QuickScaling<kNvfp4, kRotated, kStochastic> scaling(global_scale);
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const Vector vector = next[i % kAhead];
    if (is_inside(i + kAhead)) {
      next[i % kAhead] = Vector::load_once(thread_x, (i + kAhead) * kThreads);
    }
    const QuantizedVector found =
        quantize_vector<T>(options, scaling, vector, first + i * kThreads);
    if (!is_inside(i)) continue;
    __stcs(thread_q + i * kThreads, found.codes);
    if (lane_index() % kLanes == 0) thread_scale[i * (kThreads / kLanes)] = found.scale;
  }
}

}  // namespace kernelcat
