// One pass over x: elements stay in registers between the reduction to their block's maximum and
// their rounding.
#include <kernelcat/quantize.cuh>

namespace kernelcat {

constexpr int kLanes = kScaleBlock / kVector;  // threads side by side on 128 columns
constexpr int kNumThreads = 256;
constexpr int kRowStep = kNumThreads / kLanes;  // rows that a thread block reads at once

template <typename T>
struct PairOf;
template <>
struct PairOf<bfloat16> {
  using Type = __nv_bfloat162;
};
template <>
struct PairOf<float16> {
  using Type = __half2;
};

template <typename T>
__device__ __forceinline__ float vector_amax(const uint4& vector) {
  using Pair = typename PairOf<T>::Type;
  const Pair* pairs = reinterpret_cast<const Pair*>(&vector);
  const Pair amax = __hmax2(__hmax2(__habs2(pairs[0]), __habs2(pairs[1])),
                            __hmax2(__habs2(pairs[2]), __habs2(pairs[3])));
  return fmaxf(__low2float(amax), __high2float(amax));
}

template <typename T>
__device__ __forceinline__ uint2 quantized(const uint4& vector, float inverse) {
  const T* elements = reinterpret_cast<const T*>(&vector);
  uint32_t pairs[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    pairs[i] = pack_e4m3(__fmul_rn(to_float(elements[2 * i]), inverse),
                         __fmul_rn(to_float(elements[2 * i + 1]), inverse));
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// The maximum of values[i], i = lane % kCount, over the 16 lanes that share a row: the lanes divide
// the kCount rows among them, and while a lane has several values left each exchange halves them.
template <int kCount>
__device__ __forceinline__ float row_amax(float (&values)[kCount]) {
  const int lane = lane_index();
  int mask = 1;
#pragma unroll
  for (int count = kCount / 2; count > 0; count /= 2) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float low = values[2 * i], high = values[2 * i + 1];
      const float sent = lane & mask ? low : high, retained = lane & mask ? high : low;
      values[i] = fmaxf(retained, __shfl_xor_sync(0xffffffff, sent, mask));
    }
    mask *= 2;
  }
#pragma unroll
  for (; mask < kLanes; mask *= 2) {
    values[0] = fmaxf(values[0], __shfl_xor_sync(0xffffffff, values[0], mask));
  }
  return values[0];
}

// The maximum over all values of the thread block; `shared` has one float for each warp.
template <int kCount>
__device__ __forceinline__ float block_amax(const float (&values)[kCount], float* shared) {
  float amax = values[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) amax = fmaxf(amax, values[i]);
  amax = warp_max(amax);
  const int warp = warp_index();  // a shuffle: all lanes must take part
  if (lane_index() == 0) shared[warp] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kNumThreads / kWarpThreads; ++i) amax = fmaxf(amax, shared[i]);
  return amax;
}

__device__ __forceinline__ void store_elements(float8_e4m3fn* q, const uint2& vector, int count) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) q[i] = reinterpret_cast<const float8_e4m3fn*>(&vector)[i];
  }
}

// A thread block quantizes kUnroll * 16 rows x 128 columns, with kBlockRows = 128 one block of
// scales; columns run fastest in the grid. Rows that do not begin at multiples of 16 bytes are
// loaded and stored element by element.
template <typename T, int kBlockRows, int kUnroll>
__global__ void __launch_bounds__(kNumThreads)
    fp8_quantize_vectorized(const T* x,        // (m, k)
                            float8_e4m3fn* q,  // (m, k)
                            float* scale,      // (k / 128, m) for 1 x 128, else (m / 128, k / 128)
                            int m, int k) {
  static_assert(kBlockRows == 1 || kBlockRows == kUnroll * kRowStep);
  const int num_k = ceil_div(k, kScaleBlock);
  const int m_block = blockIdx.x / num_k, k_block = blockIdx.x % num_k;
  const int row_lane = threadIdx.x / kLanes, col_lane = threadIdx.x % kLanes;
  // The rows of a warp are adjacent, and so are the scales that it stores.
  const int64_t first = static_cast<int64_t>(m_block) * kUnroll * kRowStep +
                        row_lane / 2 * (2 * kUnroll) + row_lane % 2;
  const int64_t col = static_cast<int64_t>(k_block) * kScaleBlock + col_lane * kVector;
  const auto row_at = [&](int i) { return first + 2 * i; };

  const int count = static_cast<int>(min(k - col, static_cast<int64_t>(kVector)));
  const bool has_vectors = k % kVector == 0 && is_aligned(x, 16) && is_aligned(q, 8);
  uint4 vectors[kUnroll] = {};
  if (has_vectors) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (row_at(i) < m && count > 0) {
        vectors[i] = __ldcs(reinterpret_cast<const uint4*>(x + row_at(i) * k + col));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (row_at(i) < m) vectors[i] = load_elements(x + row_at(i) * k + col, count);
    }
  }
  float amax[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) amax[i] = vector_amax<T>(vectors[i]);

  // The maximum of this lane's row, first + 2 * (col_lane % kUnroll), or of the square block.
  float scale_amax;
  if constexpr (kBlockRows == 1) {
    scale_amax = fmaxf(row_amax(amax), kMinAmax);
    if (col_lane < kUnroll && row_at(col_lane) < m) {
      scale[static_cast<int64_t>(k_block) * m + row_at(col_lane)] = scale_of(scale_amax);
    }
  } else {
    __shared__ float shared[kNumThreads / kWarpThreads];
    scale_amax = fmaxf(block_amax(amax, shared), kMinAmax);
    if (threadIdx.x == 0) scale[blockIdx.x] = scale_of(scale_amax);
  }
  const float lane_inverse = inverse_of(scale_amax);
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const float inverse = __shfl_sync(0xffffffff, lane_inverse, i, kLanes);
    if (row_at(i) >= m || count <= 0) continue;
    float8_e4m3fn* address = q + row_at(i) * k + col;
    const uint2 vector = quantized<T>(vectors[i], inverse);
    if (has_vectors) {
      *reinterpret_cast<uint2*>(address) = vector;
    } else {
      store_elements(address, vector, count);
    }
  }
}

}  // namespace kernelcat
