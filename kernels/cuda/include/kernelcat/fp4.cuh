// NVFP4 and MXFP4: pairs of E2M1 codes (the first in a byte's low half), and an E4M3 or E8M0 scale
// for every 16 or 32 adjacent elements of a row. reference/_fp4.py defines both formats. Floats are
// put together by integer instructions, which every architecture has.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

template <bool kNvfp4>
constexpr int kFp4Block = kNvfp4 ? 16 : 32;  // elements that share a scale

constexpr int kWordCodes = 8;  // in a word of 32 bits

// The offset in bytes of the scale of (row, col), where a row has `num_cols` scales. Swizzled
// scales lie in cuBLASLt's tiles of 128 x 4.
template <bool kSwizzled>
__device__ __forceinline__ int64_t scale_place(int64_t row, int64_t col, int64_t num_cols) {
  if constexpr (!kSwizzled) return row * num_cols + col;
  const int64_t tile = row / 128 * ceil_div<int64_t>(num_cols, 4) + col / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + col % 4;
}

// The value of a scale's code: NaN for the codes that mean NaN, and subnormals are not flushed.
template <bool kNvfp4>
__device__ __forceinline__ float scale_value(uint32_t code) {
  if constexpr (kNvfp4) {
    const float tiny = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20);
    return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fffffff) : tiny * 0x1p120f;
  } else {
    if (code == 0xff) return __uint_as_float(0x7fffffff);
    return __uint_as_float(code == 0 ? 1u << 22 : code << 23);
  }
}

// The value of code i of a word.
__device__ __forceinline__ float code_value(uint32_t codes, int i) {
  const uint32_t code = codes >> 4 * i;
  // Shifted into a float's fields, the code is 2^-126 of its value; 0.5 becomes a subnormal.
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

}  // namespace kernelcat
