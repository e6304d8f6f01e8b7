// A warp for each row and a thread for each block of scales, element by element. RMSNorm reads the
// row twice.
#include "options.cuh"
#include "reference_codes.cuh"

namespace kernelcat {

constexpr int kLevels = 26;  // level i holds a sum of 32 * 2^i squares

// The pairwise sum of the squares of k elements, as if zeros filled k up to a power of two. Sums of
// 32 squares are counted like a binary number: a level that is already full is added to the new
// sum, which is carried to the next level.
template <typename T>
__device__ float squares_sum(const T* x, int k) {
  float levels[kLevels] = {};
  const int num_chunks = ceil_div(k, kWarpThreads);
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int col = chunk * kWarpThreads + lane_index();
    const float value = col < k ? to_float(x[col]) : 0.0f;
    float carry = lane_sum(__fmul_rn(value, value));
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

// The codes of eight values times `inverse`, rounded stochastically with nine random bits each, as
// the oracle does: scaled values are rounded to nine bits below the code first. random_codes()
// takes 16 bits for each element, so seven zeros follow the nine.
__device__ uint32_t nine_bit_codes(const float (&h)[kWordCodes], float inverse,
                                   const uint2& random) {
  float rounded[kWordCodes];
#pragma unroll
  for (int i = 0; i < kWordCodes; ++i) {
    rounded[i] = __half2float(__float2half_rn(__fmul_rn(h[i], inverse) * 0x1p-14f)) * 0x1p14f;
  }
  const auto spread = [](uint32_t half) { return (half & 0x1ff) << 7 | (half & 0xff80) << 16; };
  const uint4 bits = {spread(random.x), spread(random.x >> 16), spread(random.y),
                      spread(random.y >> 16)};
  return random_codes(rounded, 1.0f, bits);
}

template <typename T, bool kNvfp4, bool kSwizzled, bool kRmsNorm, bool kRotated, bool kStochastic>
__global__ void __launch_bounds__(128)
    nvfp4_quantize_naive(const T* x,                 // (m, k)
                         const float* global_scale,  // (1,), not read for MXFP4
                         const T* weight,            // (k,), read with kRmsNorm
                         const float* signs,         // (16,), read with kRotated
                         const uint32_t* seed,       // (2,), read with kStochastic
                         uint32_t* q,                // (m, k / 8) words of eight codes
                         uint8_t* scale,             // (m, k / 16 or 32); padded with kSwizzled
                         int m, int k, float eps) {
  constexpr int kSize = kFp4Block<kNvfp4>;
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads) + threadIdx.x / kWarpThreads;
  const int num_blocks = k / kSize;
  const Scaling<kNvfp4> scaling(global_scale);
  for (int64_t row = warp; row < m; row += num_warps) {
    const T* x_row = x + row * k;
    float row_factor = 1.0f;
    if constexpr (kRmsNorm) row_factor = inverse_rms(squares_sum(x_row, k), k, eps);
    for (int block = lane_index(); block < num_blocks; block += kWarpThreads) {
      float h[kSize];
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        h[i] = to_float(x_row[block * kSize + i]);
        if constexpr (kRmsNorm) {
          const float factor = to_float(weight[block * kSize + i]);
          h[i] = __fmul_rn(__fmul_rn(h[i], row_factor), factor);
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
      for (int part = 0; part < kSize / kWordCodes; ++part) {
        const int64_t word = (row * num_blocks + block) * (kSize / kWordCodes) + part;
        float values[kWordCodes];
#pragma unroll
        for (int i = 0; i < kWordCodes; ++i) values[i] = h[part * kWordCodes + i];
        uint32_t codes;
        if constexpr (kStochastic) {
          const uint4 random = philox(seed[0], seed[1], word / 2);
          codes = nine_bit_codes(values, found.inverse,
                                 part % 2 ? uint2{random.z, random.w} : uint2{random.x, random.y});
        } else {
          codes = nearest_codes<kNvfp4>(values, found.inverse, amax);
        }
        q[word] = is_nan ? 0 : codes;
      }
    }
  }
  if constexpr (kSwizzled) {
    clear_padding(scale, m, num_blocks, warp * kWarpThreads + lane_index(),
                  num_warps * kWarpThreads);
  }
}

}  // namespace kernelcat
