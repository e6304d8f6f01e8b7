// Sums over the ranks that serve a token, in float32 and in the order of the ranks, rounded once.
#pragma once

#include <kernelcat/pair_sums.cuh>

namespace kernelcat {

// Vectors of a token that a thread moves or adds up at once.
template <int kRanks>
constexpr int kSumUnroll = kRanks == 2   ? 4
                           : kRanks <= 4 ? 2
                                         : 1;

// `ranks` has a bit for each rank whose part counts.
template <typename T, int kRanks>
__device__ __forceinline__ uint4 sum_of_ranks(const uint4* parts,  // (kRanks,)
                                              uint32_t ranks, const uint4& residual) {
  PairSums<T, 4> sum;
  sum.start(residual);
#pragma unroll
  for (int i = 0; i < kRanks; ++i) {
    if (ranks >> i & 1) sum.add(parts[i]);
  }
  return rounded_vector(sum);
}

}  // namespace kernelcat
