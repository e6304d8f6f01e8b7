// Moving 16-byte vectors by all threads of a thread block.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// Moves `count` vectors by the threads of a thread block, kUnroll at a time: `load(i)` returns
// vector i, and `store(i, vector)` takes it.
template <int kThreads, int kUnroll, typename Load, typename Store>
__device__ __forceinline__ void move_vectors(int count, Load load, Store store) {
  for (int first = threadIdx.x; first < count; first += kUnroll * kThreads) {
    uint4 vectors[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kThreads < count) vectors[i] = load(first + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kThreads < count) store(first + i * kThreads, vectors[i]);
    }
  }
}

}  // namespace kernelcat
