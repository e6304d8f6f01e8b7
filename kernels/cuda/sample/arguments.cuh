// The arrays of `sample`, and what a row has of them.
#pragma once

#include "choose.cuh"

namespace kernelcat {

template <typename T>
struct Arguments {
  const T* logits;           // (rows, vocab)
  const float* temperature;  // (rows,), like seed and offset null where the largest logit wins
  const uint2* seed;         // (rows,) int64
  const uint2* offset;       // (rows,) int64
  const float* min_p;        // (rows,), like top_k and top_p null without filters
  const int* top_k;          // (rows,)
  const float* top_p;        // (rows,)
  const uint32_t* seen;      // (rows, ceil(vocab / 32)), like penalty null without penalty
  const float* penalty;      // (rows,)
  int* ids;                  // (rows,)
  float* logprobs;           // (rows,) or null
  int vocab;

  __device__ __forceinline__ LogitsRow<T> row(int64_t index) const {
    const T* first = logits + index * vocab;
    const uint32_t* bits = seen ? seen + index * ceil_div(vocab, 32) : nullptr;
    const bool has_vectors = vocab % kEight == 0 && is_aligned(first, 16);
    return {first, bits, penalty ? penalty[index] : 1.0f, vocab, has_vectors};
  }

  __device__ __forceinline__ RowParameters parameters(int64_t index) const {
    RowParameters parameters;
    if (temperature != nullptr) {
      parameters.temperature = temperature[index];
      parameters.key = seed[index];
      parameters.offset = offset[index];
    }
    if (min_p != nullptr) {
      parameters.min_p = min_p[index];
      parameters.top_k = top_k[index];
      parameters.top_p = top_p[index];
    }
    return parameters;
  }

  __device__ __forceinline__ void store(int64_t index, const Chosen& chosen) const {
    ids[index] = chosen.id;
    if (logprobs != nullptr) logprobs[index] = chosen.logprob;
  }
};

}  // namespace kernelcat
