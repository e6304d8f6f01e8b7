// Sixteen adjacent elements of a row, which one thread quantizes: a block of NVFP4, or half a block
// of MXFP4.
#pragma once

#include "codes.cuh"
#include "options.cuh"
#include "quick_scaling.cuh"

namespace kernelcat {

template <bool kNvfp4>
constexpr int kScaleLanes = kFp4Block<kNvfp4> / kVector;  // lanes that share a scale

// Sixteen elements of 16 bits as they lie in memory.
struct Vector {
  uint4 halves[2];

  // Loads vector `index` of `x`, which other threads read too.
  template <typename T>
  static __device__ __forceinline__ Vector load(const T* x, int64_t index) {
    const uint4* first = reinterpret_cast<const uint4*>(x) + 2 * index;
    return {first[0], first[1]};
  }

  // Loads vector `index` of `x`, which no other thread reads.
  template <typename T>
  static __device__ __forceinline__ Vector load_once(const T* x, int64_t index) {
    const uint4* first = reinterpret_cast<const uint4*>(x) + 2 * index;
    return {__ldcs(first), __ldcs(first + 1)};
  }
};

// The two elements of a word as floats; one instruction each.
template <typename T>
__device__ __forceinline__ float2 widen_pair(uint32_t pair);
template <>
__device__ __forceinline__ float2 widen_pair<bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
template <>
__device__ __forceinline__ float2 widen_pair<float16>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <typename T>
__device__ __forceinline__ void widen(const Vector& vector, Values& h) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& four = vector.halves[half];
    const uint32_t pairs[kWordCodes / 2] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kWordCodes / 2; ++i) {
      const float2 values = widen_pair<T>(pairs[i]);
      h[half][2 * i] = values.x;
      h[half][2 * i + 1] = values.y;
    }
  }
}

// The larger magnitudes of two pairs of elements, NaN where one of two elements is NaN; the signs
// of the results are undefined.
template <typename T>
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t larger_magnitudes<bfloat16>(uint32_t a, uint32_t b) {
  uint32_t result;
#if __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a & 0x7fff7fff), "r"(b & 0x7fff7fff));
#endif
  return result;
}
template <>
__device__ __forceinline__ uint32_t larger_magnitudes<float16>(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a & 0x7fff7fff), "r"(b & 0x7fff7fff));
  return result;
}

// The largest magnitude; NaN if an element is NaN.
template <typename T>
__device__ __forceinline__ float magnitude(const Vector& vector) {
  uint32_t pairs[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& four = vector.halves[half];
    pairs[half] = larger_magnitudes<T>(larger_magnitudes<T>(four.x, four.y),
                                       larger_magnitudes<T>(four.z, four.w));
  }
  const float2 values = widen_pair<T>(larger_magnitudes<T>(pairs[0], pairs[1]));
  return larger_magnitude(values.x, values.y);
}

__device__ __forceinline__ float magnitude(const Values& h) {
  float result = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    result = larger_magnitude(result, h[i / kWordCodes][i % kWordCodes]);
  return result;
}

// Elements times `signs`. For bfloat16 the instructions that move an element's bits into a float
// also flip the sign bit.
template <typename T>
__device__ __forceinline__ void widen(const Vector& vector, const float (&signs)[kVector],
                                      Values& h) {
  widen<T>(vector, h);
#pragma unroll
  for (int i = 0; i < kVector; ++i) h[i / kWordCodes][i % kWordCodes] *= signs[i];
}
template <>
__device__ __forceinline__ void widen<bfloat16>(const Vector& vector, const float (&signs)[kVector],
                                                Values& h) {
  const auto sign = [&](int i) { return __float_as_uint(signs[i]) & 0x80000000; };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& four = vector.halves[half];
    const uint32_t pairs[kWordCodes / 2] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kWordCodes; i += 2) {
      const uint32_t pair = pairs[i / 2];
      h[half][i] = __uint_as_float(pair * 0x10000 + sign(half * kWordCodes + i));
      h[half][i + 1] = __uint_as_float((pair & 0xffff0000) ^ sign(half * kWordCodes + i + 1));
    }
  }
}

// Four times the Hadamard transform; its last round combines the two halves.
__device__ __forceinline__ void rotate(Values& h) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    butterflies<1>(h[half]);
    butterflies<2>(h[half]);
    butterflies<4>(h[half]);
  }
#pragma unroll
  for (int i = 0; i < kWordCodes; ++i) {
    const float first = h[0][i], second = h[1][i];
    h[0][i] = __fadd_rn(first, second);
    h[1][i] = __fsub_rn(first, second);
  }
}

// What a thread reads once for its options.
template <bool kRotated, bool kStochastic>
struct Options {
  float signs[kVector];  // of the transform
  uint32_t key[2];       // of stochastic rounding

  // `transform_signs` (16,), `seed` (2,).
  __device__ __forceinline__ Options(const float* transform_signs, const uint32_t* seed) {
    if constexpr (kRotated) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(transform_signs + i);
        signs[i] = four.x;
        signs[i + 1] = four.y;
        signs[i + 2] = four.z;
        signs[i + 3] = four.w;
      }
    }
    if constexpr (kStochastic) {
      key[0] = seed[0];
      key[1] = seed[1];
    }
  }
};

// The codes of a vector, and the code of its block's scale.
struct QuantizedVector {
  uint2 codes;
  uint32_t scale;
};

// Quantizes vector `index` of the matrix, whose largest magnitude is `amax`. All lanes of a warp
// call this together, each with a vector.
template <bool kNvfp4, bool kRotated, bool kStochastic>
__device__ __forceinline__ QuantizedVector
quantize_values(const Options<kRotated, kStochastic>& options,
                const QuickScaling<kNvfp4, kRotated, kStochastic>& scaling, const Values& h,
                float amax, int64_t index) {
#pragma unroll
  for (int mask = 1; mask < kScaleLanes<kNvfp4>; mask *= 2) {
    amax = larger_magnitude(amax, __shfl_xor_sync(0xffffffff, amax, mask));
  }
  const BlockScale found = scaling.of(amax);
  uint2 codes;
  if constexpr (kStochastic) {
    const uint4 random = philox(options.key[0], options.key[1], index);
    codes = {random_codes_by_halves(h[0], found.inverse, {random.x, random.y}),
             random_codes_by_halves(h[1], found.inverse, {random.z, random.w})};
  } else {
    codes = nearest_codes_by_integers(h, found.inverse, scaling.saturates(found.code));
  }
  if (amax != amax) codes = {0, 0};
  return {codes, found.code};
}

// Quantizes vector `index` of the matrix as quantize_values() does, from elements as they were
// loaded.
template <typename T, bool kNvfp4, bool kRotated, bool kStochastic>
__device__ __forceinline__ QuantizedVector
quantize_vector(const Options<kRotated, kStochastic>& options,
                const QuickScaling<kNvfp4, kRotated, kStochastic>& scaling, const Vector& vector,
                int64_t index) {
  Values h;
  float amax;
  if constexpr (kRotated) {
    widen<T>(vector, options.signs, h);
    rotate(h);
    amax = magnitude(h);
  } else {
    widen<T>(vector, h);
    amax = magnitude<T>(vector);
  }
  return quantize_values(options, scaling, h, amax, index);
}

}  // namespace kernelcat
