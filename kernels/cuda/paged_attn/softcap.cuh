// The bound of scores.
#pragma once

#include <kernelcat/softmax.cuh>

namespace kernelcat {

// softcap * tanh(score / softcap), where `exponent` is 2 * log2(e) * score / softcap:
// tanh(x) = 1 - 2 / (1 + exp(2 x)). The error, some 2^-22 of the softcap, is that of fast_exp2 and
// of the fast division; tanhf is more exact near 0, where it does not matter, and takes a branch.
__device__ __forceinline__ float cap_score(float exponent, float softcap) {
  return softcap - __fdividef(2.0f * softcap, 1.0f + fast_exp2(exponent));
}

}  // namespace kernelcat
