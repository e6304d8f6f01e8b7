// The first tokens that a warp was offered, in order.
#pragma once

#include <kernelcat/sync.cuh>
#include <kernelcat/token_order.cuh>

namespace kernelcat {

// Lane i holds the i-th token. All 32 lanes call all functions together.
struct TopList {
  ScoredToken token;

  // Adds those of the lanes' tokens that belong to the first `top_k`. A lane without a token passes
  // a default one. No token may be offered twice.
  __device__ __forceinline__ void offer(const ScoredToken& offered, int top_k) {
    const ScoredToken last = of_lane(token, top_k - 1);
    uint32_t waiting = __ballot_sync(0xffffffff, offered.precedes(last));
    for (; waiting != 0; waiting &= waiting - 1) insert(of_lane(offered, __ffs(waiting) - 1));
  }

 private:
  static __device__ __forceinline__ ScoredToken of_lane(const ScoredToken& value, int lane) {
    return {__shfl_sync(0xffffffff, value.score, lane), __shfl_sync(0xffffffff, value.id, lane)};
  }

  // Tokens after the new one move to the next lane.
  __device__ __forceinline__ void insert(const ScoredToken& added) {
    const ScoredToken before = {__shfl_up_sync(0xffffffff, token.score, 1),
                                __shfl_up_sync(0xffffffff, token.id, 1)};
    if (!added.precedes(token)) return;
    token = lane_index() > 0 && added.precedes(before) ? before : added;
  }
};

}  // namespace kernelcat
