// kernels/cuda/include/kernelcat/fp8_to_fp16.cuh on the host: the conversion of a pair.
#pragma once

#include <kernelcat/fp8.cuh>

namespace kernelcat {

inline uint32_t e4m3_to_float16(uint32_t bytes) {
  float8_e4m3fn elements[4];
  std::memcpy(elements, &bytes, 4);
  return pack<float16>(to_float(elements[0]), to_float(elements[1]));
}

}  // namespace kernelcat
