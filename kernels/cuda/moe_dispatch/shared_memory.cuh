// The dynamic shared memory of a thread block that dispatches.
#pragma once

#include "arrivals.cuh"
#include "row.cuh"

namespace kernelcat {

// kernels/cuda/moe_dispatch/__init__.py has the same layout. `num_rows` rows are sent between two
// barriers.
template <int kRanks, int kThreads>
struct DispatchMemory {
  float* words;   // (num_rows, num_scales), of rows that are sent
  int2* scratch;  // (kThreads / 32,), of sums over the thread block
  Arrivals arrivals;
  uint8_t* ranks;  // of the thread block's tokens

  template <bool kFloat8, int kIdWords>
  __device__ __forceinline__ DispatchMemory(uint8_t* memory, const RowShape<kFloat8>& shape,
                                            const Tokens<kIdWords>& tokens, int num_rows) {
    scratch = reinterpret_cast<int2*>(memory);
    arrivals.num_groups_of_rank = tokens.num_groups();
    arrivals.num_groups = kRanks * tokens.num_groups();
    arrivals.who = reinterpret_cast<uint64_t*>(scratch + kThreads / kWarpThreads);
    arrivals.rows = reinterpret_cast<int*>(arrivals.who + arrivals.num_groups);
    words = reinterpret_cast<float*>(arrivals.rows + arrivals.num_groups + 1);
    ranks = reinterpret_cast<uint8_t*>(words + num_rows * shape.num_scales);
  }
};

}  // namespace kernelcat
