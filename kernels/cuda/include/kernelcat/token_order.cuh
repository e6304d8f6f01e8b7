// The order of tokens: by falling score, and by rising id where scores are equal.
#pragma once

#include <kernelcat/softmax.cuh>

namespace kernelcat {

constexpr int kNoToken = 0x7fffffff;  // comes after every token

struct ScoredToken {
  float score = -kInfinity;
  int id = kNoToken;

  __device__ __forceinline__ bool precedes(const ScoredToken& other) const {
    return score > other.score || (score == other.score && id < other.id);
  }

  // Becomes the first of both.
  __device__ __forceinline__ void merge(const ScoredToken& other) {
    if (other.precedes(*this)) *this = other;
  }
};

}  // namespace kernelcat
