// Tiles of 16-byte vectors, and the rings of tiles in a window that peers write to.
#pragma once

#include <kernelcat/pair_sums.cuh>
#include <kernelcat/window.cuh>

namespace kernelcat {

constexpr int kRingTiles = 4;  // tiles of a ring

// A tile is kUnroll vectors of each thread.
template <int kThreads, int kUnroll>
struct TileShape {
  static constexpr int kVectors = kThreads * kUnroll;

  // The place of a thread's vector i in a tile.
  __device__ static __forceinline__ int place(int i) { return i * kThreads + threadIdx.x; }
};

// The ring in which `sender` leaves tiles for the thread block of the same index. `round` is 0 or
// 1; a launch with two rounds has twice the rings.
template <typename Shape, int kRanks>
__device__ __forceinline__ uint4* ring_tile(Window* window, int half, int round, int sender,
                                            int tile) {
  const int ring = (round * gridDim.x + blockIdx.x) * kRanks + sender;
  return window->tiles[half] + (ring * kRingTiles + tile % kRingTiles) * Shape::kVectors;
}

// The sum of the vectors at `place` of tile `tile`: this rank's is `mine`, those of the others lie
// in the rings of round 0.
template <typename T, typename Shape, int kRanks>
__device__ __forceinline__ uint4 sum_over_ranks(Window* own, int half, int rank, int tile,
                                                int place, const uint4& mine) {
  uint4 parts[kRanks];
#pragma unroll
  for (int i = 0; i < kRanks; ++i) {
    parts[i] = i == rank ? mine : ring_tile<Shape, kRanks>(own, half, 0, i, tile)[place];
  }
  PairSums<T, 4> sum;
  sum.start(parts[0]);
#pragma unroll
  for (int i = 1; i < kRanks; ++i) sum.add(parts[i]);
  return rounded_vector(sum);
}

}  // namespace kernelcat
