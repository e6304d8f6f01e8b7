// Experts that are spread over ranks: rank r holds the experts r * local_experts to
// (r + 1) * local_experts - 1.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// The rank that holds expert `id`, or -1 for a negative id.
template <int kRanks>
__device__ __forceinline__ int holder_of(int id, int local_experts) {
  int rank = id < 0 ? -1 : 0;
#pragma unroll
  for (int i = 1; i < kRanks; ++i) rank += id >= i * local_experts;
  return rank;
}

// Bit r says whether rank r holds an expert of a token. Each lane of a warp has the id of an
// expert, or -1. The lanes call this together, and all return the same.
template <int kRanks>
__device__ __forceinline__ uint32_t ranks_of_token(int id, int local_experts) {
  const int holder = holder_of<kRanks>(id, local_experts);
  uint32_t ranks = 0;
#pragma unroll
  for (int i = 0; i < kRanks; ++i) {
    ranks |= static_cast<uint32_t>(__any_sync(0xffffffff, holder == i)) << i;
  }
  return ranks;
}

// What a lane gives to ranks_of_token for `token` with expert_ids (tokens, top_k), top_k <= 32.
__device__ __forceinline__ int id_of_lane(const int* expert_ids, int token, int top_k) {
  const int64_t first = static_cast<int64_t>(token) * top_k;
  return lane_index() < top_k ? expert_ids[first + lane_index()] : -1;
}

// In shared memory: ranks[n] has a bit for each rank that serves token `token_of(n)`, n < count.
// All threads call this together.
template <int kRanks, int kThreads, typename TokenOf>
__device__ __forceinline__ void find_ranks(uint8_t* ranks, int count, const int* expert_ids,
                                           int top_k, int local_experts, TokenOf token_of) {
  for (int n = threadIdx.x / kWarpThreads; n < count; n += kThreads / kWarpThreads) {
    const int id = id_of_lane(expert_ids, token_of(n), top_k);
    const uint32_t found = ranks_of_token<kRanks>(id, local_experts);
    if (lane_index() == 0) ranks[n] = found;
  }
  __syncthreads();
}

}  // namespace kernelcat
