// Every rank sends all of its elements to every peer, tile by tile, and sums up what arrives. While
// a tile travels, the tile before it is summed up.
//
// A ring of four tiles needs no answer from its reader: before tile k is sent, signal k - 2 of the
// reader has arrived, and the reader sums up tile k - 4 before that signal.
#include <kernelcat/pdl.cuh>

#include "tiles.cuh"

namespace kernelcat {

template <typename T, int kRanks, int kThreads, int kUnroll, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    all_reduce_one_shot(const T* x,  // (num_elements,)
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
  const int64_t num_vectors = num_elements / 8;
  const int64_t num_tiles = ceil_div<int64_t>(num_vectors, Shape::kVectors);
  const int count = static_cast<int>((num_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
  const auto first_of = [&](int tile) {
    return (static_cast<int64_t>(tile) * gridDim.x + blockIdx.x) * Shape::kVectors;
  };
  for (int tile = 0; tile <= count; ++tile) {
    if (tile < count) {
      const int64_t first = first_of(tile);
      uint4 mine[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = first + Shape::place(i);
        if (at < num_vectors) mine[i] = vectors[at];
      }
#pragma unroll
      for (int shift = 1; shift < kRanks; ++shift) {
        uint4* remote = ring_tile<Shape, kRanks>(windows.of[shift], half, 0, rank, tile);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          if (first + Shape::place(i) < num_vectors) remote[Shape::place(i)] = mine[i];
        }
      }
      send_signals(windows, 0, epoch, tile + 1);
    }
    if (tile > 0) {
      if (!wait_for_signals(windows, 0, epoch, tile)) break;
      const int64_t first = first_of(tile - 1);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = first + Shape::place(i);
        if (at >= num_vectors) continue;
        reinterpret_cast<uint4*>(out)[at] = sum_over_ranks<T, Shape, kRanks>(
            own, half, rank, tile - 1, Shape::place(i), vectors[at]);
      }
    }
  }
  end_epoch(own, epoch);
}

}  // namespace kernelcat
