// Which experts have tokens, and which assignments each of these experts serves. Every thread block
// makes the lists for itself. All make the same lists: thread blocks that share an expert must
// agree on the assignments of each of its passes.
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

// Arrays in shared memory. Weights of an expert are multiplied by at most kPassCols assignments at
// a time: an expert with more takes several passes, an expert without assignments none.
template <int kPassCols>
struct ExpertLists {
  int* order;       // (assignments,) grouped by expert, ascending
  int* starts;      // (passes + 1,) where a pass's assignments begin in `order`
  int* expert;      // (passes,) the expert of each pass, ascending
  int* cursors;     // (experts,)
  int* num_passes;  // (1,)

  static __device__ __forceinline__ ExpertLists at(int* address, int assignments, int experts) {
    const int max_passes = experts + assignments / kPassCols;
    ExpertLists lists;
    lists.order = address;
    lists.starts = lists.order + assignments;
    lists.expert = lists.starts + max_passes + 1;
    lists.cursors = lists.expert + max_passes;
    lists.num_passes = lists.cursors + experts;
    return lists;
  }

  // `ids` (assignments,) are in shared memory, written before this call without a barrier. All
  // threads of the thread block call this; the lists are visible to all of them afterwards.
  __device__ __forceinline__ void build(const int* ids, int assignments, int experts) const {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) cursors[e] = 0;
    __syncthreads();
    for (int a = threadIdx.x; a < assignments; a += blockDim.x) atomicAdd(&cursors[ids[a]], 1);
    __syncthreads();
    if (threadIdx.x < kWarpThreads) {
      scan(experts);
      __syncwarp();
      place(ids, assignments);
    }
    __syncthreads();
  }

  // The sum of `value` of this lane and of all lower lanes.
  static __device__ __forceinline__ int sum_up_to_lane(int value) {
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const int lower = __shfl_up_sync(0xffffffff, value, distance);
      if (lane_index() >= distance) value += lower;
    }
    return value;
  }

  // Replaces each expert's count by the place of its first assignment, and lists the passes. One
  // warp calls this.
  __device__ __forceinline__ void scan(int experts) const {
    int total = 0, found = 0;
    for (int first = 0; first < experts; first += kWarpThreads) {
      const int id = first + lane_index(), count = id < experts ? cursors[id] : 0;
      const int passes = ceil_div(count, kPassCols);
      const int end = sum_up_to_lane(count), last = sum_up_to_lane(passes);
      const int start = total + end - count, place = found + last - passes;
      if (id < experts) cursors[id] = start;
      for (int pass = 0; pass < passes; ++pass) {
        expert[place + pass] = id;
        starts[place + pass] = start + pass * kPassCols;
      }
      total += __shfl_sync(0xffffffff, end, kWarpThreads - 1);
      found += __shfl_sync(0xffffffff, last, kWarpThreads - 1);
    }
    if (lane_index() == 0) {
      starts[found] = total;
      *num_passes = found;
    }
  }

  // Fills `order`. One warp calls this: the threads of a thread block would race for the places.
  __device__ __forceinline__ void place(const int* ids, int assignments) const {
    const uint32_t lower_lanes = (1u << lane_index()) - 1;
    for (int first = 0; first < assignments; first += kWarpThreads) {
      const int assignment = first + lane_index();
      const bool is_one = assignment < assignments;
      const int id = is_one ? ids[assignment] : -1;
      const uint32_t same = __match_any_sync(0xffffffff, id);
      const int rank = __popc(same & lower_lanes), begin = is_one ? cursors[id] : 0;
      __syncwarp();
      if (is_one) order[begin + rank] = assignment;
      if (is_one && rank == 0) cursors[id] = begin + __popc(same);
      __syncwarp();
    }
  }
};

// Row groups [begin, end) that a thread block multiplies by the assignments of pass `pass`.
struct Segment {
  int pass, begin, end;
};

// The segments of a thread block, in its order of work: items [first, last) of the row groups of
// all passes.
template <int kPassCols>
struct Segments {
  ExpertLists<kPassCols> lists;
  int num_groups;  // row groups of an expert
  int first, last;

  __device__ __forceinline__ Segment at(int pass) const {
    return {pass, max(first - pass * num_groups, 0), min(last - pass * num_groups, num_groups)};
  }
  __device__ __forceinline__ Segment front() const { return at(first / num_groups); }
  __device__ __forceinline__ bool contains(const Segment& segment) const {
    return segment.pass * num_groups < last;
  }
  __device__ __forceinline__ Segment after(const Segment& segment) const {
    return at(segment.pass + 1);
  }

  __device__ __forceinline__ int expert(const Segment& segment) const {
    return lists.expert[segment.pass];
  }
  // The assignments of a segment, and how many there are.
  __device__ __forceinline__ const int* assignments(const Segment& segment) const {
    return lists.order + lists.starts[segment.pass];
  }
  __device__ __forceinline__ int num_cols(const Segment& segment) const {
    return lists.starts[segment.pass + 1] - lists.starts[segment.pass];
  }
};

}  // namespace kernelcat
