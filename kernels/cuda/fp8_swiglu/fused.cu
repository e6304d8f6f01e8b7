// One pass over x: the values y = silu(gate) * up stay in registers between the reduction to their
// block's maximum and their rounding.
#include <kernelcat/quantize.cuh>

namespace kernelcat {

constexpr int kPairs = kVector / 2;  // elements of q that come from one vector of x
static_assert(kWarpThreads * kPairs == kScaleBlock, "a row of a warp is one block of scales");

// x * sigmoid(x), three instructions shorter than silu() of epilogue.cuh, because subnormal
// intermediate results become zero.
__device__ __forceinline__ float silu(float x) {
  float exp, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exp) : "f"(x * -1.44269504f));  // -log2(e)
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + exp));
  return x * sigmoid;
}

// The value y = silu(gate) * up of each pair of the vector.
template <typename T>
__device__ __forceinline__ float4 gated(const uint4& vector) {
  const T* x = reinterpret_cast<const T*>(&vector);
  const auto y = [&](int i) { return silu(to_float(x[2 * i])) * to_float(x[2 * i + 1]); };
  return {y(0), y(1), y(2), y(3)};
}

__device__ __forceinline__ float vector_amax(const float4& y) {
  return fmaxf(fmaxf(fabsf(y.x), fabsf(y.y)), fmaxf(fabsf(y.z), fabsf(y.w)));
}

// The maximum over the warp of values that are not negative: the bits of such floats have the same
// order as the floats, and one instruction reduces integers.
__device__ __forceinline__ float warp_amax(float amax) {
  return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(amax)));
}

__device__ __forceinline__ uint32_t quantized(const float4& y, float inverse) {
  const uint16_t low = pack_e4m3(__fmul_rn(y.x, inverse), __fmul_rn(y.y, inverse));
  const uint16_t high = pack_e4m3(__fmul_rn(y.z, inverse), __fmul_rn(y.w, inverse));
  uint32_t pairs;
  asm("mov.b32 %0, {%1, %2};" : "=r"(pairs) : "h"(low), "h"(high));
  return pairs;
}

// A warp makes kUnroll rows x 128 columns of q, each row of which is a block of scales; the warps
// of a thread block lie below each other, and columns run fastest in the grid. Rows that do not
// begin at multiples of 16 bytes are loaded and stored element by element.
template <typename T, int kNumWarps, int kUnroll>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads)
    fp8_swiglu_fused(const T* x,        // (m, n)
                     float8_e4m3fn* q,  // (m, n / 2)
                     float* scale,      // (n / 256, m)
                     int m, int n) {
  const int num_blocks = ceil_div(n / 2, kScaleBlock), lane = lane_index();
  const int rows_block = blockIdx.x / num_blocks, block = blockIdx.x % num_blocks;
  const int64_t row = (static_cast<int64_t>(rows_block) * kNumWarps + warp_index()) * kUnroll;
  const int64_t col = static_cast<int64_t>(block) * kScaleBlock + lane * kPairs;
  const int num_rows = static_cast<int>(min(m - row, static_cast<int64_t>(kUnroll)));
  const int count = static_cast<int>(min(n - 2 * col, static_cast<int64_t>(kVector)));

  const bool has_vectors = n % kVector == 0 && is_aligned(x, 16) && is_aligned(q, 4);
  x += row * n + 2 * col;
  q += row * (n / 2) + col;
  uint4 vectors[kUnroll] = {};
  if (has_vectors) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i, x += n) {
      if (i < num_rows && count > 0) vectors[i] = __ldcs(reinterpret_cast<const uint4*>(x));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i, x += n) {
      if (i < num_rows) vectors[i] = load_elements(x, count);
    }
  }

  float4 y[kUnroll];
  float row_amax = 0.0f;  // of row lane % kUnroll
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    y[i] = gated<T>(vectors[i]);
    const float amax = warp_amax(vector_amax(y[i]));
    row_amax = lane % kUnroll == i ? amax : row_amax;
  }
  row_amax = fmaxf(row_amax, kMinAmax);
  if (lane < num_rows) {
    scale[static_cast<int64_t>(block) * m + row + lane] = scale_of(row_amax);
  }
  const float lane_inverse = inverse_of(row_amax);
#pragma unroll
  for (int i = 0; i < kUnroll; ++i, q += n / 2) {
    const float inverse = __shfl_sync(0xffffffff, lane_inverse, i);
    if (i >= num_rows || count <= 0) continue;
    const uint32_t vector = quantized(y[i], inverse);
    if (has_vectors) {
      *reinterpret_cast<uint32_t*>(q) = vector;
    } else {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        if (2 * j < count) q[j].__x = static_cast<uint8_t>(vector >> 8 * j);
      }
    }
  }
}

}  // namespace kernelcat
