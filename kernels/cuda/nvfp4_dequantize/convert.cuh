// Values to the element type of the result. NaN becomes the one that conversions make.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

using float32 = float;

constexpr int kCodes = 8;  // of a word

template <typename T>
__device__ __forceinline__ T converted(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

}  // namespace kernelcat
