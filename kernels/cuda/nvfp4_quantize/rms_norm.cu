// RMSNorm and quantization in one pass: a thread block holds a row in registers.
#include "vector.cuh"

namespace kernelcat {

// The sum over a warp of values[i], in lane i and those that are a multiple of kCount, a power of
// two, after it: lanes hand each other half of what they hold until they hold one.
template <int kMask = 1, int kCount>
__device__ __forceinline__ float lanes_sums(const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return lanes_sum<kMask>(values[0]);
  } else {
    const bool odd = lane_index() & kMask;
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float own = odd ? values[2 * i + 1] : values[2 * i];
      const float other = odd ? values[2 * i] : values[2 * i + 1];
      sums[i] = __fadd_rn(own, __shfl_xor_sync(0xffffffff, other, kMask));
    }
    return lanes_sums<2 * kMask>(sums);
  }
}

// The sum of the squares of a vector. Those of 16 bits are exact, so that one rounding is a pair's.
template <typename T>
__device__ __forceinline__ float squares_sum(const Vector& vector) {
  Values h;
  widen<T>(vector, h);
  float squares[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float even = h[i / kWord][i % kWord], odd = h[i / kWord][i % kWord + 1];
    squares[i / 2] = fmaf(odd, odd, __fmul_rn(even, even));
  }
  return neighbours_sum(squares);
}

// What a row is multiplied by, of which thread t has vectors t, t + kThreads ...: its sum adds up
// neighbours first, as if zeros filled the row up to a power of two.
template <int kThreads, int kUnroll>
__device__ __forceinline__ float row_factor(const float (&partial)[kUnroll], int k, float eps) {
  constexpr int kWarps = kThreads / kWarpThreads, kCount = kUnroll * kWarps;
  constexpr int kOwn = kCount <= kWarpThreads ? 1 : kCount / kWarpThreads;
  __shared__ float shared[kCount];
  const float sum = lanes_sums(partial);
  if (lane_index() < kUnroll) {
    shared[lane_index() * kWarps + threadIdx.x / kWarpThreads] = sum;
  }
  __syncthreads();
  float own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = lane_index() * kOwn + i;
    own[i] = at < kCount ? shared[at] : 0.0f;
  }
  return inverse_root(lanes_sum(neighbours_sum(own)), k, eps);
}

// Of an SM: with more of them registers spill.
template <bool kOptions>
constexpr int kNormThreads = kOptions ? 512 : 1024;

// Rows of up to kThreads * kUnroll vectors; kUnroll is a power of two, kWhole is whether a row is
// whole warps of vectors. The first m thread blocks have a row each, those after them clear
// swizzled scales' padding.
template <typename T, bool kNvfp4, bool kSwizzled, bool kRotated, bool kStochastic, int kThreads,
          int kUnroll, bool kWhole>
__global__ void __launch_bounds__(kThreads, kNormThreads<kRotated || kStochastic> / kThreads)
    nvfp4_quantize_rms_norm(const T* x, const float* global_scale, const T* weight,
                            const float* signs, const uint32_t* seed, uint2* q, uint8_t* scale,
                            int m, int k, float eps) {
  constexpr int kLanes = kScaleLanes<kNvfp4>;
  const int num_blocks = k / kFp4Block<kNvfp4>, row_vectors = k / kVector;
  if constexpr (kSwizzled) {
    if (blockIdx.x >= m) {
      const int64_t stride = static_cast<int64_t>(gridDim.x - m) * kThreads;
      const int64_t index = static_cast<int64_t>(blockIdx.x - m) * kThreads + threadIdx.x;
      return clear_padding(scale, m, num_blocks, index, stride);
    }
  }
  const int warp_first = threadIdx.x / kWarpThreads * kWarpThreads;
  const auto is_inside = [&](int i) {
    return (kWhole ? warp_first : static_cast<int>(threadIdx.x)) + i * kThreads < row_vectors;
  };
  const uint32_t row = blockIdx.x;
  const int64_t first = static_cast<int64_t>(row) * row_vectors + threadIdx.x;
  const T* from = x + first * kVector;
  Vector vectors[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (!kWhole) vectors[i] = {};
    if (is_inside(i)) vectors[i] = Vector::load_once(from, i * kThreads);
  }
  const Options<kRotated, kStochastic> options(signs, seed);
  const QuickScaling<kNvfp4, kRotated, kStochastic> scaling(global_scale);
  float partial[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    partial[i] = 0.0f;
    if (is_inside(i)) partial[i] = squares_sum<T>(vectors[i]);
  }
  const float factor = row_factor<kThreads>(partial, k, eps);

  // `scale_place` in 32 bits as far as they reach: tiles of four columns are 512 bytes apart.
  const uint32_t scale_col = threadIdx.x / kLanes;
  constexpr int kNextScale = kThreads / kLanes * (kSwizzled ? 128 : 1);
  uint8_t* scales;
  if constexpr (kSwizzled) {
    const uint64_t tile = static_cast<uint64_t>(row / 128) * (ceil_div(num_blocks, 4) * 512);
    scales =
        scale + tile + (row % 32 * 16 + row % 128 / 32 * 4 + scale_col / 4 * 512 + scale_col % 4);
  } else {
    scales = scale + static_cast<uint64_t>(row) * num_blocks + scale_col;
  }
  const T* own_weights = weight + threadIdx.x * kVector;
  uint2* to = q + first;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (warp_first + i * kThreads >= row_vectors) break;
    Vector weights;
    if (!kWhole) weights = {};
    if (is_inside(i)) weights = Vector::load(own_weights, i * kThreads);
    Values h, factors;
    widen<T>(vectors[i], h);
    widen<T>(weights, factors);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float& value = h[j / kWord][j % kWord];
      value = __fmul_rn(__fmul_rn(value, factor), factors[j / kWord][j % kWord]);
      if constexpr (kRotated) value *= options.signs[j];
    }
    if constexpr (kRotated) rotate(h);
    const Coded found = coded_values(options, scaling, h, magnitude(h), first + i * kThreads);
    if (!is_inside(i)) continue;
    __stcs(to + i * kThreads, found.codes);
    if (lane_index() % kLanes == 0) scales[i * kNextScale] = found.scale;
  }
}

}  // namespace kernelcat
