// Stream-K: the last waves of tiles are dealt out by k-blocks, so that all thread blocks end
// together, and the thread blocks that share a tile add up their sums (Osama et al. 2023).
//
// No thread block waits for another one: whichever arrives last at a tile finishes the tile. So
// nothing depends on how many thread blocks run at a time. Sums are added in the order of k, and
// counters are zero again at the end.
#pragma once

#include <kernelcat/block_schedule.cuh>
#include <kernelcat/partial_tiles.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// A tile whose BlockSchedule is the one below.
template <typename Tile>
struct StreamTile : Tile {
  static_assert(Tile::kClusterM == 1 && Tile::kClusterN == 1);
};

// The thread blocks `first` to `first + count - 1`, which share a streamed tile.
struct Sharers {
  int first, count;
};

// Where a warpgroup leaves its sums of a streamed tile, and the count of those that have arrived.
struct SharedTile {
  float* partials;  // of the tile's first sharer; the others' follow, `stride` floats apart
  int64_t stride;
  uint32_t* counter;  // zero before and after
  int part, count;    // this thread block among the sharers, and how many there are
};

// The work of a thread block: a range of the k-blocks of all streamed tiles, which are the first
// `num_streamed`, then every gridDim.x-th of the other tiles. In a WorkItem `split_tile` is the
// streamed tile, or -1 where the thread block has all its k-blocks.
template <typename Tile>
struct BlockSchedule<StreamTile<Tile>> {
  static constexpr int rank = 0;
  int num_m, num_n, num_k, num_streamed, group_m;

  static __device__ __forceinline__ BlockSchedule of(int m, int n, int k, int num_streamed,
                                                     int group_m) {
    return {ceil_div(Tile::kSwap ? n : m, Tile::BLOCK_M),
            ceil_div(Tile::kSwap ? m : n, Tile::BLOCK_N), ceil_div(k, Tile::BLOCK_K), num_streamed,
            group_m};
  }

  static __device__ __forceinline__ int cluster_row() { return 0; }
  static __device__ __forceinline__ int cluster_col() { return 0; }

  __device__ __forceinline__ uint32_t num_units() const { return num_streamed * num_k; }

  // The first k-block of thread block `block`; k-blocks of all streamed tiles are numbered.
  __device__ __forceinline__ int first_unit(uint32_t block) const {
    return static_cast<int>(static_cast<uint64_t>(num_units()) * block / gridDim.x);
  }

  // The thread block that multiplies k-block `unit`.
  __device__ __forceinline__ int block_of(uint32_t unit) const {
    return static_cast<int>((static_cast<uint64_t>(unit + 1) * gridDim.x - 1) / num_units());
  }

  __device__ __forceinline__ Sharers sharers(int streamed_tile) const {
    const int first = block_of(streamed_tile * num_k);
    return {first, block_of((streamed_tile + 1) * num_k - 1) - first + 1};
  }

  // A streamed tile of which consumer `consumer` has sums. `partials` has a slot of BLOCK_M *
  // BLOCK_N floats for each work item that does not have all k-blocks: from one to the next, tile
  // plus thread block grows. `counters` has one for each consumer and streamed tile.
  __device__ __forceinline__ SharedTile shared_tile(const WorkItem& work, int consumer,
                                                    float* partials, uint32_t* counters) const {
    constexpr int kSums = Tile::BLOCK_M * Tile::BLOCK_N;
    const Sharers sharers = this->sharers(work.split_tile);
    const int64_t slot = work.split_tile + sharers.first;
    return {.partials = partials + slot * kSums + consumer * (kSums / Tile::kNumConsumers),
            .stride = kSums,
            .counter = counters + work.split_tile * Tile::kNumConsumers + consumer,
            .part = static_cast<int>(blockIdx.x) - sharers.first,
            .count = sharers.count};
  }

  // Calls `function(work, row, col)` for each work item, with the tile's first row and column.
  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const int num_tiles = num_m * num_n, end = first_unit(blockIdx.x + 1);
    int unit = first_unit(blockIdx.x), whole = num_streamed + blockIdx.x;
    while (unit < end || whole < num_tiles) {
      int index = whole, k_begin = 0, k_end = num_k;
      if (unit < end) {
        index = unit / num_k;
        k_begin = unit - index * num_k;
        k_end = min(num_k, k_begin + end - unit);
        unit += k_end - k_begin;
      } else {
        whole += gridDim.x;
      }
      const bool is_shared = k_end - k_begin < num_k;
      const kernelcat::Tile tile = grouped_tile(index, num_m, num_n, group_m);
      const WorkItem work{.tile = tile,
                          .k_begin = k_begin,
                          .k_end = k_end,
                          .split_tile = is_shared ? index : -1,
                          .split = 0};
      function(work, tile.m * Tile::BLOCK_M, tile.n * Tile::BLOCK_N);
    }
  }
};

// What thread 0 of a warpgroup decides, in all of its threads. A template: NVRTC 13.0 takes a
// lambda with a parameter of type auto for a host function.
template <typename Decide>
__device__ __forceinline__ bool agreed(Decide decide, uint32_t* flag, int barrier) {
  named_barrier_sync(barrier, kWarpgroupThreads);
  if (threadIdx.x % kWarpgroupThreads == 0) {
    *flag = decide();
    __threadfence();
  }
  named_barrier_sync(barrier, kWarpgroupThreads);
  return *flag != 0;
}

// Adds up a tile's sums in the order of k. Returns true in the warpgroup that arrives last, which
// then holds the result in `sums`, and false in the others. All 128 threads call this together; it
// needs a flag in shared memory and a named barrier to itself. Of two sharers, whose sum does not
// depend on the order, the last one keeps its sums in registers.
//
// Only sums inside the result are moved: those of the first `num_tiles_inside` of the kNumTiles
// tiles of 64 rows, and of their kCount sums the first `num_sums_inside`, a multiple of 4.
template <int kNumTiles, int kCount>
__device__ __forceinline__ bool add_up_sharers(float (&sums)[kNumTiles][kCount],
                                               const SharedTile& shared_tile, int num_tiles_inside,
                                               int num_sums_inside, uint32_t* flag, int barrier) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  const uint32_t num_others = shared_tile.count - 1;
  const bool is_pair = num_others == 1;
  const PartialTiles<kNumTiles, kCount> inside = {num_tiles_inside, num_sums_inside};
  const auto partial = [&](int part, int tile) {
    const int first = tile * kCount * kWarpgroupThreads;
    return reinterpret_cast<float4*>(shared_tile.partials + part * shared_tile.stride + first) +
           thread;
  };
  const auto arrive = [&](uint32_t count) {
    const auto count_others = [&] { return atomicAdd(shared_tile.counter, count) == num_others; };
    return agreed(count_others, flag, barrier);
  };

  bool is_last = is_pair && arrive(0);
  if (!is_last) {
    inside.store(sums, partial, shared_tile.part);
    __threadfence();
    is_last = arrive(1);
  }
  if (!is_last) return false;

  if (thread == 0) *shared_tile.counter = 0;
  const int begin = is_pair ? 1 - shared_tile.part : 0;
  const int end = is_pair ? begin + 1 : shared_tile.count;
#pragma unroll
  for (int tile = 0; tile < kNumTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[tile][i] = is_pair ? sums[tile][i] : 0.0f;
  }
  inside.add(sums, partial, begin, end);
  return true;
}

}  // namespace kernelcat
