// One pass: 16 bytes a load, kUnroll of them in flight; rows follow one another without a seam.
#include "vector.cuh"

namespace kernelcat {

// The first `main_blocks` thread blocks quantize, those after them clear swizzled scales' padding.
template <typename T, bool kNvfp4, bool kSwizzled, bool kRotated, bool kStochastic, int kThreads,
          int kUnroll>
__global__ void __launch_bounds__(kThreads)
    nvfp4_quantize_vectorized(const T* x, const float* global_scale, const T* weight,
                              const float* signs, const uint32_t* seed, uint32_t* q, uint8_t* scale,
                              int m, int k, int main_blocks) {
  const Arrays<T> arrays = {x, global_scale, weight, signs, seed, q, scale};
  const int num_blocks = k / kFp4Block<kNvfp4>, row_vectors = k / kVector;
  if constexpr (kSwizzled) {
    if (blockIdx.x >= main_blocks) {
      const int64_t stride = static_cast<int64_t>(gridDim.x - main_blocks) * kThreads;
      const int64_t index = static_cast<int64_t>(blockIdx.x - main_blocks) * kThreads + threadIdx.x;
      return clear_padding(arrays.scale, m, num_blocks, index, stride);
    }
  }
  const int64_t end = static_cast<int64_t>(m) * row_vectors;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  const uint4* all = reinterpret_cast<const uint4*>(x);
  uint4 vectors[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (first + i * kThreads < end) vectors[i] = __ldcs(all + first + i * kThreads);
  }
  const Scaling<kNvfp4> scaling(arrays.global_scale);
  Place place = {first, 0, 0, true};
  if constexpr (kSwizzled) {
    place.row = first / row_vectors;
    place.col = static_cast<int>(first - place.row * row_vectors);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    place.inside = place.index < end;
    float h[kVector];
    widen<T>(vectors[i], h);
    write_codes<kNvfp4, kSwizzled, kRotated, kStochastic>(arrays, scaling, h, place, num_blocks);
    place.index += kThreads;
    if constexpr (kSwizzled) {
      place.col += kThreads;
      while (place.col >= row_vectors) {
        place.col -= row_vectors;
        ++place.row;
      }
    }
  }
}

}  // namespace kernelcat
