// Experts that are spread over ranks: rank r holds the experts r * local_experts to
// (r + 1) * local_experts - 1.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Bit r says whether rank r holds an expert of the token with these ids (top_k,), at most 32, of
// which -1 is none. The lanes of a warp call this together, and all return the same.
template <int kRanks>
__device__ __forceinline__ uint32_t ranks_of_token(const int* expert_ids, int top_k,
                                                   int local_experts) {
  const int id = lane_index() < top_k ? expert_ids[lane_index()] : -1;
  const int holder = id < 0 ? kRanks : id / local_experts;
  uint32_t ranks = 0;
#pragma unroll
  for (int i = 0; i < kRanks; ++i) {
    ranks |= static_cast<uint32_t>(__any_sync(0xffffffff, holder == i)) << i;
  }
  return ranks;
}

}  // namespace kernelcat
