// Which experts have tokens, and which assignments each of these experts serves. Every thread block
// makes the lists for itself. The order of an expert's assignments differs from run to run; no
// result depends on it.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Arrays in shared memory. An active expert is one that serves at least one assignment.
struct ExpertLists {
  int* order;       // (assignments,) grouped by expert
  int* starts;      // (active + 1,) where an active expert's assignments begin in `order`
  int* active;      // (active,) ids of the active experts, ascending
  int* cursors;     // (experts,)
  int* num_active;  // (1,)

  static __device__ __forceinline__ ExpertLists at(int* address, int assignments, int experts) {
    ExpertLists lists;
    lists.order = address;
    lists.starts = lists.order + assignments;
    lists.active = lists.starts + experts + 1;
    lists.cursors = lists.active + experts;
    lists.num_active = lists.cursors + experts;
    return lists;
  }

  // `ids` (assignments,) are in shared memory, written before this call without a barrier. All
  // threads of the thread block call this; the lists are visible to all of them afterwards.
  __device__ __forceinline__ void build(const int* ids, int assignments, int experts) const {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) cursors[e] = 0;
    __syncthreads();
    for (int a = threadIdx.x; a < assignments; a += blockDim.x) atomicAdd(&cursors[ids[a]], 1);
    __syncthreads();
    if (threadIdx.x < kWarpThreads) scan(experts);
    __syncthreads();
    for (int a = threadIdx.x; a < assignments; a += blockDim.x) {
      order[atomicAdd(&cursors[ids[a]], 1)] = a;
    }
    __syncthreads();
  }

  // Replaces each expert's count by the place of its first assignment. One warp calls this.
  __device__ __forceinline__ void scan(int experts) const {
    const int lane = lane_index();
    int total = 0, found = 0;
    for (int first = 0; first < experts; first += kWarpThreads) {
      const int expert = first + lane, count = expert < experts ? cursors[expert] : 0;
      int end = count;  // of this lane's expert and the experts of lower lanes
#pragma unroll
      for (int distance = 1; distance < kWarpThreads; distance *= 2) {
        const int lower = __shfl_up_sync(0xffffffff, end, distance);
        if (lane >= distance) end += lower;
      }
      const uint32_t has_tokens = __ballot_sync(0xffffffff, count > 0);
      const int start = total + end - count;
      if (expert < experts) cursors[expert] = start;
      if (count > 0) {
        const int place = found + __popc(has_tokens & ((1u << lane) - 1));
        active[place] = expert;
        starts[place] = start;
      }
      found += __popc(has_tokens);
      total += __shfl_sync(0xffffffff, end, kWarpThreads - 1);
    }
    if (lane == 0) {
      starts[found] = total;
      *num_active = found;
    }
  }

  // Assignments of active expert number `index`.
  __device__ __forceinline__ int count(int index) const {
    return starts[index + 1] - starts[index];
  }
};

// Row groups [begin, end) of active expert number `index`, which a thread block multiplies by the
// expert's assignments from number `pass` * kPassCols on.
struct Segment {
  int index, pass, begin, end;
};

// The segments of a thread block, in its order of work: items [first, last) of all active experts'
// row groups. Weights of an expert with more than kPassCols assignments are multiplied in passes.
template <int kPassCols>
struct Segments {
  ExpertLists lists;
  int num_groups;  // row groups of an expert
  int first, last;

  __device__ __forceinline__ Segment at(int index, int pass) const {
    return {index, pass, max(first - index * num_groups, 0),
            min(last - index * num_groups, num_groups)};
  }
  __device__ __forceinline__ Segment front() const { return at(first / num_groups, 0); }
  __device__ __forceinline__ bool contains(const Segment& segment) const {
    return segment.index * num_groups < last;
  }
  __device__ __forceinline__ Segment after(const Segment& segment) const {
    const bool is_done = (segment.pass + 1) * kPassCols >= lists.count(segment.index);
    return is_done ? at(segment.index + 1, 0) : at(segment.index, segment.pass + 1);
  }

  // The assignments of a segment, and how many there are.
  __device__ __forceinline__ const int* assignments(const Segment& segment) const {
    return lists.order + lists.starts[segment.index] + segment.pass * kPassCols;
  }
  __device__ __forceinline__ int num_cols(const Segment& segment) const {
    return min(lists.count(segment.index) - segment.pass * kPassCols, kPassCols);
  }
};

}  // namespace kernelcat
