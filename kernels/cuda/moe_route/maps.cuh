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
  int totals[kMaxExperts];   // assignments of all tokens, before the capacity limit; 0 beyond the
                             // last expert
  int earlier[kMaxExperts];  // assignments of tokens before those of the thread block
  int starts[kMaxExperts + 1];

  // One warp makes `starts`, the exclusive prefix sums of `totals` limited to `capacity`.
  __device__ __forceinline__ void scan(int capacity) {
    constexpr int kPerLane = kMaxExperts / kWarpThreads;
    int counts[kPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      counts[i] = min(totals[lane_index() * kPerLane + i], capacity);
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

  // Stores counts and offsets and adds to `load`: the task of one thread block of the grid. The
  // threads before `first_thread` do nothing.
  __device__ __forceinline__ void store(const Routed& out, int experts, int capacity,
                                        int first_thread = 0) const {
    const int first = static_cast<int>(threadIdx.x) - first_thread;
    if (first < 0) return;
#pragma unroll 1
    for (int e = first; e < experts; e += blockDim.x - first_thread) {
      out.counts[e] = min(totals[e], capacity);
      out.offsets[e] = starts[e];
      if (out.load) out.load[e] += totals[e];
    }
    if (first == 0) out.offsets[experts] = starts[kMaxExperts];
  }

  // Stores the place of `assignment`, which has `rank` among those of the thread block that have
  // the same expert; returns whether the assignment is served.
  __device__ __forceinline__ bool place(const Routed& out, int assignment, int expert, int rank,
                                        int capacity) const {
    const int rank_of_all = expert < 0 ? capacity : earlier[expert] + rank;
    const bool is_served = rank_of_all < capacity;
    const int place = is_served ? starts[expert] + rank_of_all : -1;
    out.position[assignment] = place;
    if (is_served) out.order[place] = assignment;
    if (assignment >= starts[kMaxExperts]) out.order[assignment] = -1;
    return is_served;
  }

  // As `place`, where expert_ids and weights are stored: takes the assignment back where the expert
  // is full.
  __device__ __forceinline__ void place_stored(const Routed& out, int assignment, int expert,
                                               int rank, int capacity) const {
    if (!place(out, assignment, expert, rank, capacity)) {
      out.expert_ids[assignment] = -1;
      out.weights[assignment] = 0.0f;
    }
  }
};

}  // namespace kernelcat
