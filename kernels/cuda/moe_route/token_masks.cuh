// Which tokens of a thread block use an expert: bit masks, from which the number of assignments of
// an expert, and the rank of each among them, are counted by population counts.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Masks of kTokens tokens, a multiple of 32 (or fewer than 32).
template <int kTokens, int kMaxExperts>
struct TokenMasks {
  static constexpr int kWords = (kTokens + 31) / 32;
  uint32_t words[kWords][kMaxExperts];

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kWords * kMaxExperts; i += blockDim.x) {
      words[i / kMaxExperts][i % kMaxExperts] = 0;
    }
  }

  __device__ __forceinline__ void add(int token, int expert) {
    atomicOr(&words[token / 32][expert], 1u << token % 32);
  }

  __device__ __forceinline__ int count(int expert) const {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) sum += __popc(words[w][expert]);
    return sum;
  }

  // Tokens before `token` that use the expert.
  __device__ __forceinline__ int rank(int token, int expert) const {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int num_bits = token - 32 * w;
      const uint32_t before = num_bits >= 32 ? 0xffffffff : num_bits > 0 ? (1u << num_bits) - 1 : 0;
      sum += __popc(words[w][expert] & before);
    }
    return sum;
  }
};

}  // namespace kernelcat
