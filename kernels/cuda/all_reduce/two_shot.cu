// A group is a tile for each rank. In round 0 every rank sends each rank that rank's tile; in round
// 1 it sends the sum of its own tile to all. Round 1 of a group runs while round 0 of the next
// group travels, and its result is stored one group later.
//
// Rings of four tiles need no answers. Round 0: before group k is sent, signal k - 3 of round 1 has
// arrived, so the reader has summed up group k - 4. Round 1: before the sum of group k is sent,
// signal k of round 0 has arrived, so the reader has stored group k - 3.
#include <kernelcat/pdl.cuh>

#include "tiles.cuh"

namespace kernelcat {

template <typename T, int kRanks, int kThreads, int kUnroll, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    all_reduce_two_shot(const T* x,  // (num_elements,)
                        T* out,      // (num_elements,)
                        int64_t num_elements, int rank, Window* window0, Window* window1,
                        Window* window2, Window* window3, Window* window4, Window* window5,
                        Window* window6, Window* window7) {
  using Shape = TileShape<kThreads, kUnroll>;
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  const uint32_t epoch = begin_epoch(own);
  if (has_failed(own)) return;
  const int half = epoch % 2;
  const uint4* vectors = reinterpret_cast<const uint4*>(x);
  uint4* results = reinterpret_cast<uint4*>(out);
  const int64_t num_vectors = num_elements / 8;
  const int64_t num_groups = ceil_div<int64_t>(num_vectors, kRanks * Shape::kVectors);
  const int count = static_cast<int>((num_groups - blockIdx.x + gridDim.x - 1) / gridDim.x);
  const auto first_of = [&](int group, int owner) {
    const int64_t index = static_cast<int64_t>(group) * gridDim.x + blockIdx.x;
    return (index * kRanks + owner) * Shape::kVectors;
  };
  for (int group = 0; group < count + 2; ++group) {
    if (group < count) {
#pragma unroll
      for (int shift = 1; shift < kRanks; ++shift) {
        const int64_t first = first_of(group, windows.peer(shift));
        uint4* remote = ring_tile<Shape, kRanks>(windows.of[shift], half, 0, rank, group);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int64_t at = first + Shape::place(i);
          if (at < num_vectors) remote[Shape::place(i)] = vectors[at];
        }
      }
      send_signals(windows, 0, epoch, group + 1);
    }
    if (0 < group && group <= count) {
      if (!wait_for_signals(windows, 0, epoch, group)) break;
      const int64_t first = first_of(group - 1, rank);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = first + Shape::place(i);
        if (at >= num_vectors) continue;
        const uint4 sum = sum_over_ranks<T, Shape, kRanks>(own, half, rank, group - 1,
                                                           Shape::place(i), vectors[at]);
        results[at] = sum;
#pragma unroll
        for (int shift = 1; shift < kRanks; ++shift) {
          uint4* remote = ring_tile<Shape, kRanks>(windows.of[shift], half, 1, rank, group - 1);
          remote[Shape::place(i)] = sum;
        }
      }
      send_signals(windows, 1, epoch, group);
    }
    if (group > 1) {
      if (!wait_for_signals(windows, 1, epoch, group - 1)) break;
#pragma unroll
      for (int shift = 1; shift < kRanks; ++shift) {
        const int peer = windows.peer(shift);
        const int64_t first = first_of(group - 2, peer);
        const uint4* local = ring_tile<Shape, kRanks>(own, half, 1, peer, group - 2);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int64_t at = first + Shape::place(i);
          if (at < num_vectors) results[at] = local[Shape::place(i)];
        }
      }
    }
  }
  end_epoch(own, epoch);
}

}  // namespace kernelcat
