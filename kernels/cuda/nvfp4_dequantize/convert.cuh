// Conversion of values to the element type of the result.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

using float32 = float;

// `value` as a T. A NaN becomes the NaN that the conversion instruction makes.
template <typename T>
__device__ __forceinline__ T converted(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    return from_float<T>(value);
  }
}

}  // namespace kernelcat
