// Integer names and 16-bit element types, the same under nvcc and NVRTC (which has no <cstdint>).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kernelcat {

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;

using bfloat16 = __nv_bfloat16;
using float16 = __half;

constexpr int kWarpThreads = 32;
constexpr int kWarpgroupThreads = 128;

template <typename Integer>
__host__ __device__ constexpr Integer ceil_div(Integer value, Integer divisor) {
  return (value + divisor - 1) / divisor;
}

__device__ __forceinline__ float to_float(bfloat16 value) {
  return __bfloat162float(value);
}
__device__ __forceinline__ float to_float(float16 value) {
  return __half2float(value);
}

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ float16 from_float<float16>(float value) {
  return __float2half_rn(value);
}

// Two elements in one register, `low` at the lower address.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack<float16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ bool is_aligned(const void* pointer, int bytes) {
  return (reinterpret_cast<uint64_t>(pointer) & (bytes - 1)) == 0;
}

}  // namespace kernelcat
