// float as an element type, beside the 16-bit ones of types.cuh.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

using float32 = float;

__device__ __forceinline__ float to_float(float value) {
  return value;
}
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}

}  // namespace kernelcat
