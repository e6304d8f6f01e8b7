// A warp a row, a thread a block of scales, element by element. RMSNorm reads the row twice.
#include "options.cuh"

namespace kernelcat {

constexpr int kLevels = 26;  // of sums of 32, 64 ... squares

// Sums 32 squares at a time; what has as many neighbours before it is added to them, as digits
// carry when a number is counted up.
template <typename T>
__device__ float squares_sum(const T* x, int k) {
  float levels[kLevels] = {};
  const int num_chunks = ceil_div(k, kWarpThreads);
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int col = chunk * kWarpThreads + lane_index();
    const float value = col < k ? to_float(x[col]) : 0.0f;
    float carry = lanes_sum(__fmul_rn(value, value));
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool is_full = (chunk >> level) & 1,
                 carries = (chunk & ((1 << level) - 1)) == (1 << level) - 1;
      if (carries && is_full) carry = __fadd_rn(levels[level], carry);
      if (carries && !is_full) levels[level] = carry;
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int level = 0; level < kLevels; ++level) {
    if ((num_chunks >> level) & 1) sum = __fadd_rn(levels[level], sum);
  }
  return sum;
}

// The codes of `h` times `inverse`, eight elements that `random` is of. `random_codes` takes
// sixteen bits an element: seven of them are zeros, and what it is given has nine bits below a
// code.
__device__ uint32_t chance_codes(const float (&h)[kWord], float inverse, const uint2& random) {
  float rounded[kWord];
#pragma unroll
  for (int i = 0; i < kWord; ++i) {
    rounded[i] = __half2float(__float2half_rn(__fmul_rn(h[i], inverse) * 0x1p-14f)) * 0x1p14f;
  }
  const auto spread = [](uint32_t half) { return (half & 0x1ff) << 7 | (half & 0xff80) << 16; };
  const uint4 bits = {spread(random.x), spread(random.x >> 16), spread(random.y),
                      spread(random.y >> 16)};
  return random_codes(rounded, 1.0f, bits);
}

template <typename T, bool kNvfp4, bool kSwizzled, bool kRmsNorm, bool kRotated, bool kStochastic>
__global__ void __launch_bounds__(128)
    nvfp4_quantize_naive(const T* x, const float* global_scale, const T* weight, const float* signs,
                         const uint32_t* seed, uint32_t* q, uint8_t* scale, int m, int k,
                         float eps) {
  constexpr int kSize = kFp4Block<kNvfp4>;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads) + threadIdx.x / kWarpThreads;
  const int num_blocks = k / kSize;
  const Scaling<kNvfp4> scaling(global_scale);
  for (int64_t row = warp; row < m; row += num_warps) {
    const T* from = x + row * k;
    float inverse_rms = 1.0f;
    if constexpr (kRmsNorm) inverse_rms = inverse_root(squares_sum(from, k), k, eps);
    for (int block = lane_index(); block < num_blocks; block += kWarpThreads) {
      float h[kSize];
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        h[i] = to_float(from[block * kSize + i]);
        if constexpr (kRmsNorm) {
          const float factor = to_float(weight[block * kSize + i]);
          h[i] = __fmul_rn(__fmul_rn(h[i], inverse_rms), factor);
        }
        if constexpr (kRotated) h[i] *= signs[i % kHadamard];
      }
      if constexpr (kRotated) {
        butterflies<1>(h);
        butterflies<2>(h);
        butterflies<4>(h);
        butterflies<8>(h);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if constexpr (kRotated) h[i] *= 0.25f;
        amax = larger_magnitude(amax, h[i]);
      }
      const bool is_nan = amax != amax;
      const BlockScale found = scaling.of(is_nan ? 0.0f : amax);
      scale[scale_place<kSwizzled>(row, block, num_blocks)] = is_nan ? scaling.kNan : found.code;
#pragma unroll
      for (int part = 0; part < kSize / kWord; ++part) {
        const int64_t place = (row * num_blocks + block) * (kSize / kWord) + part;
        float own[kWord];
#pragma unroll
        for (int i = 0; i < kWord; ++i) own[i] = h[part * kWord + i];
        uint32_t codes;
        if constexpr (kStochastic) {
          const uint4 four = philox(seed[0], seed[1], place / 2);
          codes = chance_codes(own, found.inverse,
                               part % 2 ? uint2{four.z, four.w} : uint2{four.x, four.y});
        } else {
          codes = nearest_codes<kNvfp4>(own, found.inverse, amax);
        }
        q[place] = is_nan ? 0 : codes;
      }
    }
  }
  if constexpr (kSwizzled) {
    clear_padding(scale, m, num_blocks, warp * kWarpThreads + lane_index(),
                  num_warps * kWarpThreads);
  }
}

}  // namespace kernelcat
