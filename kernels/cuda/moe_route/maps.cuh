// The index maps: from each expert's number of assignments to offsets, and from these to the places
// of assignments.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// The outputs of the entry; `load` may be null.
struct Routed {
  int* expert_ids;  // (tokens, top_k)
  float* weights;   // (tokens, top_k)
  int* counts;      // (experts,)
  int* offsets;     // (experts + 1,)
  int* order;       // (tokens * top_k,)
  int* position;    // (tokens, top_k)
  int* load;        // (experts,)
};

// What a thread block has to find out about each expert before it places assignments.
template <int kMaxExperts>
struct ExpertCounts {
  int totals[kMaxExperts];   // assignments of all tokens, before the capacity limit
  int earlier[kMaxExperts];  // assignments of tokens before those of the thread block
  int starts[kMaxExperts + 1];

  // One warp makes `starts`, the exclusive prefix sums of `totals` limited to `capacity`.
  __device__ __forceinline__ void scan(int experts, int capacity) {
    constexpr int kPerLane = kMaxExperts / kWarpThreads;
    int counts[kPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane_index() * kPerLane + i;
      counts[i] = expert < experts ? min(totals[expert], capacity) : 0;
      sum += counts[i];
    }
    int end = sum;
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffff, end, distance);
      if (lane_index() >= distance) end += before;
    }
    int start = end - sum;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      starts[lane_index() * kPerLane + i] = start;
      start += counts[i];
    }
    if (lane_index() == kWarpThreads - 1) starts[kMaxExperts] = end;
  }

  // Stores counts and offsets and adds to `load`: the task of one thread block of the grid.
  __device__ __forceinline__ void store(const Routed& out, int experts, int capacity) const {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
      out.counts[e] = min(totals[e], capacity);
      out.offsets[e] = starts[e];
      if (out.load) out.load[e] += totals[e];
    }
    if (threadIdx.x == 0) out.offsets[experts] = starts[kMaxExperts];
  }

  // Stores the place of `assignment`, which has `rank` among those of the thread block that have
  // the same expert; takes the assignment back where the expert is full.
  __device__ __forceinline__ void place(const Routed& out, int assignment, int expert, int rank,
                                        int capacity) const {
    const int rank_of_all = expert < 0 ? capacity : earlier[expert] + rank;
    if (rank_of_all < capacity) {
      const int place = starts[expert] + rank_of_all;
      out.position[assignment] = place;
      out.order[place] = assignment;
    } else {
      out.expert_ids[assignment] = -1;
      out.weights[assignment] = 0.0f;
      out.position[assignment] = -1;
    }
    if (assignment >= starts[kMaxExperts]) out.order[assignment] = -1;
  }
};

}  // namespace kernelcat
