// A list of the first tokens, in order, which a warp holds in registers.
#pragma once

#include <kernelcat/sync.cuh>
#include <kernelcat/token_order.cuh>

namespace kernelcat {

// Lane i holds the i-th token. All 32 lanes call all functions together.
struct TopList {
  ScoredToken token;

  // Adds those of the lanes' tokens that belong to the first `top_k`. A lane without a token passes
  // a default one. No token may be offered twice.
  __device__ __forceinline__ void offer(const ScoredToken& candidate, int top_k) {
    const ScoredToken last = of_lane(token, top_k - 1);
    uint32_t lanes = __ballot_sync(0xffffffff, candidate.precedes(last));
    for (; lanes != 0; lanes &= lanes - 1) insert(of_lane(candidate, __ffs(lanes) - 1));
  }

 private:
  static __device__ __forceinline__ ScoredToken of_lane(const ScoredToken& value, int lane) {
    return {__shfl_sync(0xffffffff, value.score, lane), __shfl_sync(0xffffffff, value.id, lane)};
  }

  // Tokens after the new one move to the next lane.
  __device__ __forceinline__ void insert(const ScoredToken& candidate) {
    const ScoredToken before = {__shfl_up_sync(0xffffffff, token.score, 1),
                                __shfl_up_sync(0xffffffff, token.id, 1)};
    if (!candidate.precedes(token)) return;
    token = lane_index() > 0 && candidate.precedes(before) ? before : candidate;
  }
};

}  // namespace kernelcat
