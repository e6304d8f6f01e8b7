// NVFP4: two E2M1 values (sign, 2 bits of exponent, 1 of mantissa) in a byte, the first in its low
// half, and a scale in e4m3, which has no sign, for 16 neighbours.
#pragma once

#include <kernelcat/fp8.cuh>

namespace kernelcat {

struct float4_e2m1fn_x2 {
  uint8_t codes;
};

constexpr int kScaledValues = 16;

__device__ __forceinline__ float to_float(float4_e2m1fn_x2 pair, int index) {
  const uint32_t code = pair.codes >> 4 * index;
  // The code's place in a float makes it 2^-126 of its value, 0.5 (a subnormal) included.
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

}  // namespace kernelcat
