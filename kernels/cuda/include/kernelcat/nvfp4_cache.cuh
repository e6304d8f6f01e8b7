// NVFP4 as an element type: two E2M1 values (sign, 2 exponent bits, 1 mantissa bit) in a byte, the
// first in the low half. 16 neighbours share a scale in e4m3, which is never negative.
#pragma once

#include <kernelcat/fp8.cuh>

namespace kernelcat {

struct float4_e2m1fn_x2 {
  uint8_t codes;
};

constexpr int kNvfp4Block = 16;  // values that share a scale

__device__ __forceinline__ float to_float(float4_e2m1fn_x2 pair, int index) {
  const uint32_t code = pair.codes >> 4 * index;
  // At the position of a float's exponent and mantissa the code means 2^-126 times its value, also
  // for 0.5, which is subnormal.
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

}  // namespace kernelcat
