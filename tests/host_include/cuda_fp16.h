// float16 on the host: what kernelcat/types.cuh uses.
#pragma once

#include "cuda_host.h"

struct __half {
  _Float16 value;
};
struct __half2 {
  __half x, y;
};

inline float __half2float(__half value) {
  return static_cast<float>(value.value);
}
inline __half __float2half_rn(float value) {
  return {static_cast<_Float16>(value)};
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
