// Logits of a row, eight tokens at a time.
#pragma once

#include <kernelcat/float32.cuh>
#include <kernelcat/softmax.cuh>

namespace kernelcat {

constexpr int kEight = 8;  // tokens that a thread takes at a time
using EightLogits = float[kEight];

// Eight neighbouring elements, as they are in memory.
template <typename T>
struct alignas(16) Eight {
  T values[kEight];
};

// A row of `logits` in global memory; `seen` has a bit for each token, and is null without penalty.
template <typename T>
struct LogitsRow {
  const T* logits;
  const uint32_t* seen;
  float penalty;
  int vocab;
  bool has_vectors;  // every eight tokens begin at a multiple of 16 bytes

  // Tokens 8 * eight to 8 * eight + 7; beyond the vocabulary -infinity.
  __device__ __forceinline__ Eight<T> load(int eight) const {
    Eight<T> loaded;
    if (has_vectors) {
      constexpr int kVectors = sizeof(Eight<T>) / 16;
      const uint4* source = reinterpret_cast<const uint4*>(logits + int64_t{eight} * kEight);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(&loaded)[i] = __ldg(source + i);
    } else {
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        const int64_t id = int64_t{eight} * kEight + i;
        loaded.values[i] = id < vocab ? logits[id] : from_float<T>(-kInfinity);
      }
    }
    return loaded;
  }

  // Loaded logits after the repetition penalty.
  __device__ __forceinline__ void penalize(EightLogits& x, const Eight<T>& loaded,
                                           int eight) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] = to_float(loaded.values[i]);
    if (seen == nullptr) return;
    const uint32_t bits = seen[eight / 4] >> eight % 4 * kEight;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (bits >> i & 1) x[i] = x[i] > 0.0f ? __fdiv_rn(x[i], penalty) : __fmul_rn(x[i], penalty);
    }
  }
};

// `value` rounded to a value that S can hold, or as it is where S has no finite value.
template <typename S>
__device__ __forceinline__ float rounded_to(float value) {
  const float rounded = to_float(from_float<S>(value));
  return fabsf(rounded) < kInfinity ? rounded : value;
}

}  // namespace kernelcat
