// E2M1 codes as pairs of bfloat16 or float16, by integer arithmetic on their bits.
#pragma once

#include <kernelcat/widen.cuh>

namespace kernelcat {

// Pairs of codes of a word, i and i + 4 in pair i, moved to the fields of pairs of T: their values
// times 2^-126 (bfloat16) or 2^-14 (float16). For bfloat16, a product by two powers of two makes
// two copies of the codes, of which one has the signs and one the rest at the right place.
template <typename T>
__device__ __forceinline__ void code_pairs(uint32_t (&pairs)[4], uint32_t word) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kIsBfloat16<T>) {
      const int shift = i % 2 * 4;  // of the codes in `word` >> 8 * (i / 2)
      const uint32_t codes = word >> i / 2 * 8 & 0x000f000fu << shift;
      pairs[i] = codes * (0x1040u >> shift) & 0x81c081c0;
    } else {
      const uint32_t high = word << (12 - 4 * i);  // the codes are the highest bits of the halves
      pairs[i] = (high & 0x80008000) | (high >> 3 & 0x0e000e00);
    }
  }
}

}  // namespace kernelcat
