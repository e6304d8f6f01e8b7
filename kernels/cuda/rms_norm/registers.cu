// One pass over memory: a row stays in registers from its loads to the stored result. A row belongs
// to one warp or to several, and short rows share a thread block.
#include <kernelcat/pdl.cuh>

#include "row.cuh"

namespace kernelcat {

// Eight elements (kVector) in 16 bytes, and where they lie: `col` is the first one's column,
// `count` how many of them are inside of the row. With has_vectors all rows begin at multiples of
// 16 bytes, and `count` is 8 or not positive.
struct Place {
  int col, count;
};

template <typename T>
__device__ __forceinline__ uint4 load(const T* row, Place place, bool has_vectors) {
  if (!has_vectors) return load_elements(row + place.col, place.count);
  return place.count > 0 ? *reinterpret_cast<const uint4*>(row + place.col) : uint4{};
}

template <typename T>
__device__ __forceinline__ void store(T* row, Place place, bool has_vectors, const uint4& vector) {
  if (has_vectors) {
    if (place.count > 0) *reinterpret_cast<uint4*>(row + place.col) = vector;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < place.count) row[place.col + i] = reinterpret_cast<const T*>(&vector)[i];
  }
}

template <typename T>
__device__ __forceinline__ uint4 add_vectors(const uint4& x, const uint4& residual) {
  uint4 h;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    reinterpret_cast<T*>(&h)[i] =
        add_rounded(reinterpret_cast<const T*>(&x)[i], reinterpret_cast<const T*>(&residual)[i]);
  }
  return h;
}

// Squares of 16-bit elements are exact in float32 or too small to matter beside eps, so a fused
// multiply-add rounds once, as the sum of two squares does.
template <typename T>
__device__ __forceinline__ float sum_squares(const uint4& h) {
  const T* elements = reinterpret_cast<const T*>(&h);
  float sums[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float even = to_float(elements[2 * i]), odd = to_float(elements[2 * i + 1]);
    sums[i] = fmaf(odd, odd, __fmul_rn(even, even));
  }
  return sum_pairs(sums);
}

// The sum of a row's squares. Thread t of the row has vectors t, t + kThreads, ..., and `partial`
// are the sums of their squares. `shared` is the row's.
template <int kThreads, int kUnroll>
__device__ __forceinline__ float sum_row(const float (&partial)[kUnroll],
                                         float (&shared)[kUnroll * kThreads / kWarpThreads]) {
  constexpr int kWarps = kThreads / kWarpThreads, kCount = kUnroll * kWarps;
  const float sum = sum_each_over_lanes(partial);
  if constexpr (kWarps == 1) {
    float total = sum;
#pragma unroll
    for (int mask = 1; mask < kUnroll; mask *= 2) {
      total = __fadd_rn(total, __shfl_xor_sync(0xffffffff, total, mask));
    }
    return total;
  } else {
    const int warp = threadIdx.x % kThreads / kWarpThreads;
    if (lane_index() < kUnroll) shared[lane_index() * kWarps + warp] = sum;
    __syncthreads();
    constexpr int kLaneSums = ceil_div(kCount, kWarpThreads);
    float sums[kLaneSums];
#pragma unroll
    for (int i = 0; i < kLaneSums; ++i) {
      const int index = lane_index() * kLaneSums + i;
      sums[i] = index < kCount ? shared[index] : 0.0f;
    }
    return sum_lanes(sum_pairs(sums));
  }
}

// The largest magnitude of y in a block of scales, which kLanes adjacent lanes hold.
template <int kLanes>
__device__ __forceinline__ float block_amax(const float (&y)[kVector]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i) amax = fmaxf(amax, fabsf(y[i]));
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffff, amax, mask));
  }
  return amax;
}

// Rounds y and stores it in a format. All lanes of a warp call this together.
template <typename T, OutFormat kFormat>
struct Output;

template <typename T>
struct Output<T, OutFormat::kSame> {
  T* out;  // (m, n)
  int n;

  __device__ __forceinline__ Output(void* out, void*, const float*, int, int n)
      : out(static_cast<T*>(out)), n(n) {}

  __device__ __forceinline__ void store(const float (&y)[kVector], int64_t row, Place place,
                                        bool has_vectors) const {
    const uint4 vector = {pack<T>(y[0], y[1]), pack<T>(y[2], y[3]), pack<T>(y[4], y[5]),
                          pack<T>(y[6], y[7])};
    kernelcat::store(out + row * n, place, has_vectors, vector);
  }
};

template <typename T>
struct Output<T, OutFormat::kFp8> {
  static constexpr int kLanes = kScaleBlock / kVector;
  float8_e4m3fn* out;  // (m, n)
  float* scale;        // (n / 128, m), rounded up
  int m, n;

  __device__ __forceinline__ Output(void* out, void* scale, const float*, int m, int n)
      : out(static_cast<float8_e4m3fn*>(out)), scale(static_cast<float*>(scale)), m(m), n(n) {}

  __device__ __forceinline__ void store(const float (&y)[kVector], int64_t row, Place place,
                                        bool has_vectors) const {
    const float amax = fmaxf(block_amax<kLanes>(y), kMinAmax), inverse = inverse_of(amax);
    uint32_t pairs[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      pairs[i] = pack_e4m3(__fmul_rn(y[2 * i], inverse), __fmul_rn(y[2 * i + 1], inverse));
    }
    const uint2 vector = {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
    if (place.count <= 0) return;
    if (lane_index() % kLanes == 0) {
      scale[static_cast<int64_t>(place.col / kScaleBlock) * m + row] = scale_of(amax);
    }
    float8_e4m3fn* address = out + row * n + place.col;
    if (has_vectors) {
      *reinterpret_cast<uint2*>(address) = vector;
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < place.count) address[i] = reinterpret_cast<const float8_e4m3fn*>(&vector)[i];
    }
  }
};

// n is a multiple of 16, so there are always vectors.
template <typename T>
struct Output<T, OutFormat::kNvfp4> {
  static constexpr int kLanes = kFp4Block<true> / kVector;
  static_assert(kVector == kWordCodes);
  uint32_t* out;   // (m, n / 8) words of eight codes
  uint8_t* scale;  // (m, n / 16)
  int n;
  Scaling<true> scaling;

  __device__ __forceinline__ Output(void* out, void* scale, const float* global_scale, int, int n)
      : out(static_cast<uint32_t*>(out)),
        scale(static_cast<uint8_t*>(scale)),
        n(n),
        scaling(global_scale) {}

  __device__ __forceinline__ void store(const float (&y)[kVector], int64_t row, Place place,
                                        bool) const {
    const float amax = block_amax<kLanes>(y);
    const BlockScale found = scaling.of(amax);
    const uint32_t codes = nearest_codes<true>(y, found.inverse, amax);
    if (place.count <= 0) return;
    out[row * (n / kVector) + place.col / kVector] = codes;
    if (lane_index() % kLanes == 0) {
      scale[row * (n / kFp4Block<true>)+place.col / kFp4Block<true>] = found.code;
    }
  }
};

// A thread block has kRows rows with kThreads threads each. A row has up to kThreads * kUnroll
// vectors, and kUnroll is a power of two. With kDependent the launch is programmatic, and the
// weight is loaded before the kernels before this one have ended: no kernel writes it.
template <typename T, OutFormat kFormat, bool kResidual, int kThreads, int kRows, int kUnroll,
          bool kDependent>
__global__ void __launch_bounds__(kThreads* kRows)
    rms_norm_registers(const T* x,                 // (m, n)
                       const T* weight,            // (n,)
                       const float* global_scale,  // (1,), read for NVFP4
                       void* out,    // (m, n) of T or E4M3, or (m, n / 8) words of eight codes
                       void* scale,  // (n / 128, m) floats for E4M3, (m, n / 16) bytes for NVFP4
                       T* residual,  // (m, n), read and written with kResidual
                       int m, int n, float eps) {
  __shared__ float shared[kRows][kUnroll * kThreads / kWarpThreads];
  const int thread = threadIdx.x % kThreads, row_idx = threadIdx.x / kThreads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + row_idx;
  const bool has_vectors = n % kVector == 0;
  const int end = row < m ? n : 0;  // rows beyond m are empty
  const auto place = [&](int i, int end) {
    const int col = (i * kThreads + thread) * kVector;
    return Place{col, min(end - col, kVector)};
  };
  uint4 weights[kUnroll], h[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) weights[i] = load(weight, place(i, end), has_vectors);
  if constexpr (kDependent) grid_dependency_wait();
  const T* x_row = x + row * n;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) h[i] = load(x_row, place(i, end), has_vectors);
  if constexpr (kResidual) {
    T* residual_row = residual + row * n;
    uint4 before[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) before[i] = load(residual_row, place(i, end), has_vectors);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      h[i] = add_vectors<T>(h[i], before[i]);
      store(residual_row, place(i, end), has_vectors, h[i]);
    }
  }
  float partial[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) partial[i] = sum_squares<T>(h[i]);
  const float rstd = inverse_rms(sum_row<kThreads>(partial, shared[row_idx]), n, eps);
  if constexpr (kDependent) launch_dependents();

  const Output<T, kFormat> output(out, scale, global_scale, m, n);
  const int warp_col = (thread - lane_index()) * kVector;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (warp_col + i * kThreads * kVector >= end) break;
    const T* elements = reinterpret_cast<const T*>(&h[i]);
    const T* factors = reinterpret_cast<const T*>(&weights[i]);
    float y[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      y[j] = normalized(to_float(elements[j]), rstd, to_float(factors[j]));
    }
    output.store(y, row, place(i, end), has_vectors);
  }
}

}  // namespace kernelcat
