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

// The sum over a row of which thread t has vectors t, t + kThreads ...: neighbours first, as if
// zeros filled the row up to a power of two.
template <int kThreads, int kUnroll>
__device__ __forceinline__ float row_sum(const float (&partial)[kUnroll]) {
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
  return lanes_sum(neighbours_sum(own));
}

// Rows of up to kThreads * kUnroll vectors; kUnroll is a power of two. The first m thread blocks
// have a row each, those after them clear swizzled scales' padding.
template <typename T, bool kNvfp4, bool kSwizzled, bool kRotated, bool kStochastic, int kThreads,
          int kUnroll>
__global__ void __launch_bounds__(kThreads, 1)
    nvfp4_quantize_rms_norm(const T* x, const float* global_scale, const T* weight,
                            const float* signs, const uint32_t* seed, uint2* q, uint8_t* scale,
                            int m, int k, float eps) {
  constexpr int kLanes = kScaleLanes<kNvfp4>;
  const Options options = {signs, seed};
  const int num_blocks = k / kFp4Block<kNvfp4>, row_vectors = k / kVector;
  if constexpr (kSwizzled) {
    if (blockIdx.x >= m) {
      const int64_t stride = static_cast<int64_t>(gridDim.x - m) * kThreads;
      const int64_t index = static_cast<int64_t>(blockIdx.x - m) * kThreads + threadIdx.x;
      return clear_padding(scale, m, num_blocks, index, stride);
    }
  }
  const auto is_inside = [&](int i) { return threadIdx.x + i * kThreads < row_vectors; };
  const int64_t row = blockIdx.x, first = row * row_vectors + threadIdx.x;
  const T* from = x + first * kVector;
  Vector vectors[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (is_inside(i)) vectors[i] = Vector::load_once(from, i * kThreads);
  }
  const Scaling<kNvfp4> scaling(global_scale);
  float partial[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    Values h;
    widen<T>(vectors[i], h);
    float squares[kVector / 2];  // of pairs; those of 16 bits are exact, so one rounding is both
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      const float even = h[j / kWord][j % kWord], odd = h[j / kWord][j % kWord + 1];
      squares[j / 2] = fmaf(odd, odd, __fmul_rn(even, even));
    }
    partial[i] = neighbours_sum(squares);
  }
  const float inverse_rms = inverse_root(row_sum<kThreads>(partial), k, eps);

  // Tiles of four columns are 512 bytes apart.
  const int scale_col = threadIdx.x / kLanes;
  constexpr int kNextScale = kThreads / kLanes * (kSwizzled ? 128 : 1);
  uint8_t* scales = scale + scale_place<kSwizzled>(row, 0, num_blocks) +
                    (kSwizzled ? scale_col / 4 * 512 + scale_col % 4 : scale_col);
  const T* own_weights = weight + threadIdx.x * kVector;
  uint2* to = q + first;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (threadIdx.x / kWarpThreads * kWarpThreads + i * kThreads >= row_vectors) break;
    Vector weights = {};
    if (is_inside(i)) weights = Vector::load(own_weights, i * kThreads);
    Values h, factors;
    widen<T>(vectors[i], h);
    widen<T>(weights, factors);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float& value = h[j / kWord][j % kWord];
      value = __fmul_rn(__fmul_rn(value, inverse_rms), factors[j / kWord][j % kWord]);
    }
    if constexpr (kRotated) rotate(h, signs);
    const Coded found = coded_values<kNvfp4, kRotated, kStochastic>(
        options, scaling, h, magnitude(h), first + i * kThreads);
    if (!is_inside(i)) continue;
    __stcs(to + i * kThreads, found.codes);
    if (lane_index() % kLanes == 0) scales[i * kNextScale] = found.scale;
  }
}

}  // namespace kernelcat
