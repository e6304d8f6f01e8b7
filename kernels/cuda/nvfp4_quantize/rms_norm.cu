// RMSNorm and quantization in one pass: a thread block holds one row in registers.
#include "vector.cuh"

namespace kernelcat {

// Pairwise sums over a warp of kCount values, a power of two: lane l returns the sum of values[l %
// kCount]. Two lanes exchange half of the values that they hold, until every lane holds one.
template <int kMask = 1, int kCount>
__device__ __forceinline__ float lane_sums(const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return lane_sum<kMask>(values[0]);
  } else {
    const bool is_odd = lane_index() & kMask;
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float retained = is_odd ? values[2 * i + 1] : values[2 * i];
      const float sent = is_odd ? values[2 * i] : values[2 * i + 1];
      sums[i] = __fadd_rn(retained, __shfl_xor_sync(0xffffffff, sent, kMask));
    }
    return lane_sums<2 * kMask>(sums);
  }
}

// The pairwise sum of the squares of a vector. Squares of 16-bit elements are exact in float32, so
// a fused multiply-add rounds once, as the sum of two squares does.
template <typename T>
__device__ __forceinline__ float squares_sum(const Vector& vector) {
  Values h;
  widen<T>(vector, h);
  float squares[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float even = h[i / kWordCodes][i % kWordCodes],
                odd = h[i / kWordCodes][i % kWordCodes + 1];
    squares[i / 2] = fmaf(odd, odd, __fmul_rn(even, even));
  }
  return pairwise_sum(squares);
}

// The factor of RMSNorm for a row. Thread t has vectors t, t + kThreads ..., and `partial` are the
// sums of their squares; they are added pairwise in the order of the row, as if zeros filled the
// row up to a power of two.
template <int kThreads, int kUnroll>
__device__ __forceinline__ float row_factor(const float (&partial)[kUnroll], int k, float eps) {
  constexpr int kWarps = kThreads / kWarpThreads, kCount = kUnroll * kWarps;
  constexpr int kLaneSums = kCount <= kWarpThreads ? 1 : kCount / kWarpThreads;
  __shared__ float shared[kCount];
  const float sum = lane_sums(partial);
  if (lane_index() < kUnroll) {
    shared[lane_index() * kWarps + threadIdx.x / kWarpThreads] = sum;
  }
  __syncthreads();
  float warp_sums[kLaneSums];
#pragma unroll
  for (int i = 0; i < kLaneSums; ++i) {
    const int warp = lane_index() * kLaneSums + i;
    warp_sums[i] = warp < kCount ? shared[warp] : 0.0f;
  }
  return inverse_rms(lane_sum(pairwise_sum(warp_sums)), k, eps);
}

// scale_place() in fewer instructions: in 32-bit arithmetic, but for the product with the row,
// where scale_place() takes 64 bits throughout. It stands between the sum of squares, which every
// thread waits for, and the first store.
template <bool kSwizzled>
__device__ __forceinline__ uint64_t scale_place_32(uint32_t row, uint32_t col, int num_cols) {
  if constexpr (!kSwizzled) return static_cast<uint64_t>(row) * num_cols + col;
  const uint64_t tile = static_cast<uint64_t>(row / 128) * (ceil_div(num_cols, 4) * 512);
  return tile + (row % 32 * 16 + row % 128 / 32 * 4 + col / 4 * 512 + col % 4);
}

// Threads that an SM holds: with more registers would spill.
template <bool kOptions>
constexpr int kResidentThreads = kOptions ? 512 : 1024;

// A row has up to kThreads * kUnroll vectors, kUnroll a power of two; with kWhole the vectors of a
// row fill whole warps. The first m thread blocks have a row each, and further ones clear the
// padding of swizzled scales.
template <typename T, bool kNvfp4, bool kSwizzled, bool kRotated, bool kStochastic, int kThreads,
          int kUnroll, bool kWhole>
__global__ void __launch_bounds__(kThreads, kResidentThreads<kRotated || kStochastic> / kThreads)
    nvfp4_quantize_rms_norm(const T* x,                 // (m, k)
                            const float* global_scale,  // (1,), not read for MXFP4
                            const T* weight,            // (k,), of RMSNorm
                            const float* signs,         // (16,), read with kRotated
                            const uint32_t* seed,       // (2,), read with kStochastic
                            uint2* q,                   // (m, k / 16) vectors of 16 codes
                            uint8_t* scale,             // (m, k / 16 or 32); padded with kSwizzled
                            int m, int k, float eps) {
  constexpr int kLanes = kScaleLanes<kNvfp4>;
  const int num_blocks = k / kFp4Block<kNvfp4>, row_vectors = k / kVector;
  if constexpr (kSwizzled) {
    if (blockIdx.x >= m) {
      const int64_t num_threads = static_cast<int64_t>(gridDim.x - m) * kThreads;
      const int64_t thread = static_cast<int64_t>(blockIdx.x - m) * kThreads + threadIdx.x;
      return clear_padding(scale, m, num_blocks, thread, num_threads);
    }
  }
  const int warp_first = threadIdx.x / kWarpThreads * kWarpThreads;
  const auto is_inside = [&](int i) {
    return (kWhole ? warp_first : static_cast<int>(threadIdx.x)) + i * kThreads < row_vectors;
  };
  const uint32_t row = blockIdx.x;
  const int64_t first = static_cast<int64_t>(row) * row_vectors + threadIdx.x;
  const T* thread_x = x + first * kVector;
  Vector vectors[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (!kWhole) vectors[i] = {};
    if (is_inside(i)) vectors[i] = Vector::load_once(thread_x, i * kThreads);
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

  // From a thread's vector to its next one: swizzled tiles of four columns are 512 bytes apart.
  constexpr int kScaleStep = kThreads / kLanes * (kSwizzled ? 128 : 1);
  uint8_t* thread_scale = scale + scale_place_32<kSwizzled>(row, threadIdx.x / kLanes, num_blocks);
  const T* thread_weight = weight + threadIdx.x * kVector;
  uint2* thread_q = q + first;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (warp_first + i * kThreads >= row_vectors) break;
    Vector weights;
    if (!kWhole) weights = {};
    if (is_inside(i)) weights = Vector::load(thread_weight, i * kThreads);
    Values h, factors;
    widen<T>(vectors[i], h);
    widen<T>(weights, factors);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float& value = h[j / kWordCodes][j % kWordCodes];
      value = __fmul_rn(__fmul_rn(value, factor), factors[j / kWordCodes][j % kWordCodes]);
      if constexpr (kRotated) value *= options.signs[j];
    }
    if constexpr (kRotated) rotate(h);
    const QuantizedVector found =
        quantize_values(options, scaling, h, magnitude(h), first + i * kThreads);
    if (!is_inside(i)) continue;
    __stcs(thread_q + i * kThreads, found.codes);
    if (lane_index() % kLanes == 0) thread_scale[i * kScaleStep] = found.scale;
  }
}

}  // namespace kernelcat
