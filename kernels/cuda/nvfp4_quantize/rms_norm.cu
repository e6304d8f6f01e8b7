// RMSNorm and quantization in one pass: a thread block holds one row after another in registers,
// and the weights in shared memory.
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
// zeros filled the row up to a power of two. Rows that follow each other alternate in `parity`.
template <int kThreads, int kUnroll>
__device__ __forceinline__ float row_sum(const float (&partial)[kUnroll], int parity) {
  constexpr int kWarps = kThreads / kWarpThreads, kCount = kUnroll * kWarps;
  constexpr int kOwn = kCount <= kWarpThreads ? 1 : kCount / kWarpThreads;
  __shared__ float both[2][kCount];
  float (&shared)[kCount] = both[parity];
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

// Rows of up to kThreads * kUnroll vectors; kUnroll is a power of two. The first row_blocks thread
// blocks, of which an SM holds kBlocks, take every row_blocks-th row; those after them clear
// swizzled scales' padding.
template <typename T, bool kNvfp4, bool kSwizzled, bool kRotated, bool kStochastic, int kThreads,
          int kUnroll, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    nvfp4_quantize_rms_norm(const T* x, const float* global_scale, const T* weight,
                            const float* signs, const uint32_t* seed, uint2* q, uint8_t* scale,
                            int m, int k, float eps, int row_blocks) {
  constexpr int kLanes = kScaleLanes<kNvfp4>, kFours = kVector / 4;
  // A thread reads what it wrote: of each vector four weights, the next four ..., then their signs.
  extern __shared__ float4 factors[];
  const auto four_of = [&](int i, int j) -> float4& {
    return factors[(i * kFours + j) * kThreads + threadIdx.x];
  };
  const auto signs_at = [&](int i) -> uint2& {
    return reinterpret_cast<uint2*>(factors +
                                    kUnroll * kFours * kThreads)[i * kThreads + threadIdx.x];
  };
  const Options options = {signs, seed};
  const int num_blocks = k / kFp4Block<kNvfp4>, row_vectors = k / kVector;
  if constexpr (kSwizzled) {
    if (blockIdx.x >= row_blocks) {
      const int64_t stride = static_cast<int64_t>(gridDim.x - row_blocks) * kThreads;
      const int64_t index = static_cast<int64_t>(blockIdx.x - row_blocks) * kThreads + threadIdx.x;
      return clear_padding(scale, m, num_blocks, index, stride);
    }
  }
  const auto is_inside = [&](int i) { return threadIdx.x + i * kThreads < row_vectors; };
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    Vector weights = {};
    if (is_inside(i)) weights = Vector::load(weight, threadIdx.x + i * kThreads);
    Values wide;
    widen<T>(weights, wide);
    signs_at(i) = signs_of(weights);
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const float* four = &wide[j / 2][j % 2 * 4];
      four_of(i, j) = {four[0], four[1], four[2], four[3]};
    }
  }
  const Scaling<kNvfp4> scaling(global_scale);
  // Swizzled tiles of four columns are 512 bytes apart.
  const int scale_col = threadIdx.x / kLanes;
  const int own_scale = kSwizzled ? scale_col / 4 * 512 + scale_col % 4 : scale_col;
  constexpr int kNextScale = kThreads / kLanes * (kSwizzled ? 128 : 1);

  Vector vectors[kUnroll] = {};
  const T* from = x + (static_cast<int64_t>(blockIdx.x) * row_vectors + threadIdx.x) * kVector;
  const auto load = [&](int i) {
    if (is_inside(i)) vectors[i] = Vector::load_once(from, i * kThreads);
  };
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) load(i);

  int parity = 0;
#pragma unroll 1
  for (int row = blockIdx.x; row < m; row += row_blocks, parity ^= 1) {
    const int64_t first = static_cast<int64_t>(row) * row_vectors + threadIdx.x;
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
    const float inverse_rms = inverse_root(row_sum<kThreads>(partial, parity), k, eps);

    uint8_t* scales = scale + scale_place<kSwizzled>(row, 0, num_blocks) + own_scale;
    uint2* to = q + first;
    from += static_cast<int64_t>(row_blocks) * k;
    asm("" : "+l"(from));  // one addition, not the product of a row again in each place
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (threadIdx.x / kWarpThreads * kWarpThreads + i * kThreads >= row_vectors) break;
      Values h;
      widen<T>(vectors[i], h);
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        const float4 four = four_of(i, j);
        const float factor[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float& value = h[j / 2][j % 2 * 4 + n];
          value = kRotated ? __fmul_rn(__fmul_rn(value, inverse_rms), factor[n])
                           : __fmul_rn(fabsf(__fmul_rn(value, inverse_rms)), fabsf(factor[n]));
        }
      }
      uint2 own = signs_of(vectors[i]);
      own = {own.x ^ signs_at(i).x, own.y ^ signs_at(i).y};
      float amax;
      if constexpr (kRotated) {
        rotate(h, signs);
        own = signs_of(h);
        amax = magnitude(h);
      } else {
        amax = magnitude_of_sizes(h);
      }
      const Coded found = coded_values<kNvfp4, kRotated, kStochastic>(options, scaling, h, own,
                                                                      amax, first + i * kThreads);
      if (!is_inside(i)) continue;
      __stcs(to + i * kThreads, found.codes);
      if (lane_index() % kLanes == 0) scales[i * kNextScale] = found.scale;
      if (row + row_blocks < m) load(i);  // of the next row, early
    }
  }
}

}  // namespace kernelcat
