// The dynamic shared memory of a thread block that dispatches.
#pragma once

#include "arrivals.cuh"
#include "row.cuh"

namespace kernelcat {

// kernels/cuda/moe_dispatch/__init__.py has the same layout.
template <int kRanks, int kThreads>
struct DispatchMemory {
  float* words;  // of a row that is sent
  int* scratch;  // of sums over the thread block
  Arrivals arrivals;

  template <bool kFloat8, int kIdWords>
  __device__ __forceinline__ DispatchMemory(uint8_t* memory, const RowShape<kFloat8>& shape,
                                            const Tokens<kIdWords>& tokens) {
    words = reinterpret_cast<float*>(memory);
    scratch = reinterpret_cast<int*>(words + 4 * shape.word_vectors());
    arrivals.num_groups_of_rank = tokens.num_groups();
    arrivals.num_groups = kRanks * tokens.num_groups();
    arrivals.who = reinterpret_cast<uint64_t*>(scratch + kThreads / kWarpThreads);
    arrivals.rows = reinterpret_cast<int*>(arrivals.who + arrivals.num_groups);
  }
};

}  // namespace kernelcat
