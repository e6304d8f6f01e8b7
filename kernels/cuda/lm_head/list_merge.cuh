// The lists of the warps of a thread block become one, and those of all thread blocks the result.
#pragma once

#include <kernelcat/top_list.cuh>

namespace kernelcat {

constexpr int kMaxTopK = 16;
constexpr int kBatch = 8;  // tokens of other thread blocks that a lane loads at once

// Whether this thread block is the last of gridDim.x to arrive, in all threads; what the other
// thread blocks wrote before they arrived is then visible. `*counter` is zero before and after;
// `is_last` lies in shared memory.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, bool& is_last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1u) + 1 == gridDim.x;
    if (is_last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Merges the lists of the warps of this thread block, and stores the result in `found`, the place
// of this thread block. `shared_lists` is where x was.
template <int kWarps, int kTokens>
__device__ __forceinline__ void merge_warps(const TopList (&lists)[kTokens],
                                            ScoredToken (&shared_lists)[kWarps][kTokens][kMaxTopK],
                                            ScoredToken* found, int tokens, int top_k) {
  const int warp = threadIdx.x / kWarpThreads, lane = lane_index();
  __syncthreads();  // all warps have read x
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if (lane < kMaxTopK) shared_lists[warp][token][lane] = lists[token].token;
  }
  __syncthreads();
  for (int token = warp; token < tokens; token += kWarps) {
    TopList list;
    for (int first = 0; first < kWarps * top_k; first += kWarpThreads) {
      const int i = first + lane;
      ScoredToken candidate;
      if (i < kWarps * top_k) candidate = shared_lists[i / top_k][token][i % top_k];
      list.offer(candidate, top_k);
    }
    if (lane < top_k) found[token * kMaxTopK + lane] = list.token;
  }
}

// Merges what the thread blocks found for one row of x: `found` is that of the first thread block,
// and the others follow at a distance of kTokens * kMaxTopK.
template <int kTokens>
__device__ __forceinline__ TopList merge_blocks(const ScoredToken* found, int top_k) {
  const int count = gridDim.x * top_k;
  TopList list;
  for (int first = lane_index(); first < ceil_div(count, kWarpThreads) * kWarpThreads;
       first += kBatch * kWarpThreads) {
    ScoredToken candidates[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kWarpThreads;
      if (i >= count) continue;
      const int64_t place = int64_t{i / top_k} * (kTokens * kMaxTopK) + i % top_k;
      const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(found) + place);
      candidates[j] = __builtin_bit_cast(ScoredToken, bits);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) list.offer(candidates[j], top_k);
  }
  return list;
}

}  // namespace kernelcat
