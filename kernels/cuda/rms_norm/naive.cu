// A warp for each row, which reads the row element by element, once for the sum of squares, and
// once or twice for the result.
#include "row.cuh"

namespace kernelcat {

constexpr int kLevels = 27;  // level i holds a sum of 32 * 2^i squares

// The sum of `get(col)` for the n columns of a row, as if zeros filled the row up to a power of
// two. Sums of 32 columns are counted like a binary number: while a level is full, its sum is added
// to the new sum, which is carried to the next level.
template <typename Get>
__device__ float sum_row(int n, Get get) {
  float levels[kLevels] = {};
  const int num_chunks = ceil_div(n, kWarpThreads);
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int col = chunk * kWarpThreads + lane_index();
    float carry = sum_lanes(col < n ? get(col) : 0.0f);
    int level = 0;
    for (; chunk >> level & 1; ++level) carry = __fadd_rn(levels[level], carry);
    levels[level] = carry;
  }
  float sum = 0.0f;
  for (int level = 0; level < kLevels; ++level) {
    if (num_chunks >> level & 1) sum = __fadd_rn(levels[level], sum);
  }
  return sum;
}

// The largest |get(col)| for the columns from `begin` to `end`.
template <typename Get>
__device__ float max_magnitude(int begin, int end, Get get) {
  float amax = 0.0f;
  for (int col = begin; col < end; ++col) amax = fmaxf(amax, fabsf(get(col)));
  return amax;
}

// Each lane quantizes blocks of 128 columns of its own; scale (n / 128, m), rounded up.
template <typename Get>
__device__ void store_fp8(int64_t row, int m, int n, float8_e4m3fn* q, float* scale, Get get) {
  for (int block = lane_index(); block < ceil_div(n, kScaleBlock); block += kWarpThreads) {
    const int begin = block * kScaleBlock, end = min(begin + kScaleBlock, n);
    const float amax = fmaxf(max_magnitude(begin, end, get), kMinAmax);
    scale[static_cast<int64_t>(block) * m + row] = scale_of(amax);
    for (int col = begin; col < end; ++col) {
      q[row * n + col] = quantized(get(col), inverse_of(amax));
    }
  }
}

// Each lane quantizes blocks of 16 columns of its own; codes (m, n / 8) words, scale (m, n / 16).
template <typename Get>
__device__ void store_nvfp4(int64_t row, int n, const float* global_scale, uint32_t* codes,
                            uint8_t* scale, Get get) {
  constexpr int kSize = kFp4Block<true>;
  const Scaling<true> scaling(global_scale);
  for (int block = lane_index(); block < n / kSize; block += kWarpThreads) {
    const float amax = max_magnitude(block * kSize, (block + 1) * kSize, get);
    const BlockScale found = scaling.of(amax);
    scale[row * (n / kSize) + block] = found.code;
    for (int word = 2 * block; word < 2 * block + 2; ++word) {
      float values[kWordCodes];
      for (int i = 0; i < kWordCodes; ++i) values[i] = get(word * kWordCodes + i);
      codes[row * (n / kWordCodes) + word] = nearest_codes<true>(values, found.inverse, amax);
    }
  }
}

template <typename T, OutFormat kFormat, bool kResidual>
__global__ void __launch_bounds__(128)
    rms_norm_naive(const T* x,                 // (m, n)
                   const T* weight,            // (n,)
                   const float* global_scale,  // (1,), read for NVFP4
                   void* out,    // (m, n) of T or E4M3, or (m, n / 8) words of eight codes
                   void* scale,  // (n / 128, m) floats for E4M3, (m, n / 16) bytes for NVFP4
                   T* residual,  // (m, n), read and written with kResidual
                   int m, int n, float eps) {
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t row = first + threadIdx.x / kWarpThreads; row < m; row += num_warps) {
    const T* h = x + row * n;
    if constexpr (kResidual) {
      T* residual_row = residual + row * n;
      for (int col = lane_index(); col < n; col += kWarpThreads) {
        residual_row[col] = add_rounded(h[col], residual_row[col]);
      }
      __syncwarp();  // other lanes read these elements below
      h = residual_row;
    }
    const float sum =
        sum_row(n, [&](int col) { return __fmul_rn(to_float(h[col]), to_float(h[col])); });
    const float rstd = inverse_rms(sum, n, eps);
    const auto y = [&](int col) {
      return normalized(to_float(h[col]), rstd, to_float(weight[col]));
    };
    if constexpr (kFormat == OutFormat::kSame) {
      T* y_row = static_cast<T*>(out) + row * n;
      for (int col = lane_index(); col < n; col += kWarpThreads) y_row[col] = from_float<T>(y(col));
    } else if constexpr (kFormat == OutFormat::kFp8) {
      store_fp8(row, m, n, static_cast<float8_e4m3fn*>(out), static_cast<float*>(scale), y);
    } else {
      store_nvfp4(row, n, global_scale, static_cast<uint32_t*>(out), static_cast<uint8_t*>(scale),
                  y);
    }
  }
}

}  // namespace kernelcat
