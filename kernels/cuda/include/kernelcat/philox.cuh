// Philox-4x32-10 (Salmon et al., SC 2011): random bits that are a function of a key and a counter.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Four random words.
__device__ __forceinline__ uint4 philox_words(uint2 key, uint4 counter) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(counter.x) * 0xd2511f53u;
    const uint64_t b = static_cast<uint64_t>(counter.z) * 0xcd9e8d57u;
    counter = {static_cast<uint32_t>(b >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(a)};
    key.x += 0x9e3779b9u;
    key.y += 0xbb67ae85u;
  }
  return counter;
}

}  // namespace kernelcat
