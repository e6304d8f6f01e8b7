// What the wgmma kernels do: a persistent kernel in which one thread fills a ring of stages by TMA,
// and one or two consumer warpgroups multiply from the ring by wgmma.
//
// The roles of warps, the register reallocation, the ping-pong of two tiles and the grouped order
// of tiles are those of CUTLASS's and DeepGEMM's warp-specialized kernels.
//
// barrier     | who arrives (how many)               | who waits   | for what
// full[s]     | producer, with the stage's bytes (1) | consumers   | stage s holds its k-block
// empty[s]    | warps that read the stage (see init) | producer    | stage s has been read
// turn[c]     | warps of the other consumer (4)      | consumer c  | a free tensor core, see below
// named 1 + c | threads of consumer c (128)          | consumer c  | its chunks, bias and is_last
// cluster     | all threads, at the start            | see below   | all mbarriers, see below
//
// The warps that arrive at empty[s] are those of a tile's consumers in the thread blocks that this
// one loads for: those of its row and of its column in the cluster.
// A turn, of kPingpong only, begins when the other consumer has started all wgmmas of its tile. The
// cluster barrier separates the initialisation of mbarriers from their first use by other thread
// blocks: consumers and the producer wait for it, the producer after its first loads. At the end
// the producer waits until the last stages are read, so that nobody arrives at a barrier of a
// thread block that is gone.
#pragma once

#include <kernelcat/operand_ring.cuh>
#include <kernelcat/skip_stages.cuh>
#include <kernelcat/split_k.cuh>
#include <kernelcat/stage_release.cuh>
#include <kernelcat/wgmma_stage.cuh>

#include "wgmma_store.cuh"

namespace kernelcat {

// Starts the product of the first kDepth columns of the next stage, and releases the previous stage
// when its product has completed. `rank` is the thread block's in its cluster.
template <typename Config, int kDepth>
__device__ __forceinline__ void multiply_k_block(WgmmaShared<Config>& shared, int rank,
                                                 PipelineState<Config::kNumStages>& position,
                                                 typename Config::Accumulators& sums, uint64_t a,
                                                 uint64_t b, int& previous, bool is_first) {
  const int stage = position.stage;
  shared.full[stage].wait(position.phase);
  multiply_stage<typename Config::T, Config::BLOCK_N, kDepth>(
      sums, advanced(a, stage * Config::kStageBytes), advanced(b, stage * Config::kStageBytes),
      !is_first);
  if (!is_first) {
    wgmma_wait<1>();
    release_stage<Config::kClusterM, Config::kClusterN>(shared.empty[previous], rank);
  }
  previous = stage;
  position.advance();
}

// Multiplies one work item of `num_k` k-blocks.
template <typename Config>
__device__ __forceinline__ void accumulate(WgmmaShared<Config>& shared, int rank,
                                           PipelineState<Config::kNumStages>& position,
                                           typename Config::Accumulators& sums, int consumer,
                                           int num_k) {
  const int first_row = Config::kPingpong ? 0 : consumer * Config::kRows;
  const uint32_t base = shared_address(shared.stages);
  const uint64_t a = swizzled_rows_descriptor(base + first_row * kRowBytes);
  const uint64_t b = swizzled_rows_descriptor(base + Config::kStageBytesA);
  constexpr bool kRagged = Config::kLastDepth < BLOCK_K;
  int previous = 0;
  for (int k_block = 0; k_block < num_k - kRagged; ++k_block) {
    multiply_k_block<Config, BLOCK_K>(shared, rank, position, sums, a, b, previous, k_block == 0);
  }
  if (kRagged) {
    multiply_k_block<Config, Config::kLastDepth>(shared, rank, position, sums, a, b, previous,
                                                 num_k == 1);
  }
  if (Config::kPingpong && lane_index() == 0) shared.turn[1 - consumer].arrive();
  wgmma_wait<0>();
  pin(sums);
  release_stage<Config::kClusterM, Config::kClusterN>(shared.empty[previous], rank);
}

// The bias of a consumer's tile. The constructor loads it into registers before the tile is
// multiplied, and store() moves it to shared memory afterwards, where the warpgroup sees it after
// its next barrier.
template <typename T, int kCount>
struct TileBias {
  T values[ceil_div(kCount, kWarpgroupThreads)];

  // `bias` (size,) or null.
  __device__ __forceinline__ TileBias(const T* bias, int first, int size) {
    for_each([&](int i, T& value) {
      value = bias != nullptr && first + i < size ? bias[first + i] : from_float<T>(0.0f);
    });
  }

  __device__ __forceinline__ void store(T (&shared)[kCount]) {
    for_each([&](int i, T& value) { shared[i] = value; });
  }

  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) {
#pragma unroll
    for (int j = 0; j < ceil_div(kCount, kWarpgroupThreads); ++j) {
      const int i = j * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
      if (i < kCount) function(i, values[j]);
    }
  }
};

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume(WgmmaShared<Config>& shared,
                                        const BlockSchedule<Config>& schedule,
                                        const TensorMap& map_d,
                                        const typename Config::Output& output, float* partials,
                                        uint32_t* counters) {
  constexpr int kTileSums = Config::kRows * Config::BLOCK_N;  // of a consumer
  const int consumer = warp_index() / 4;
  const int barrier = 1 + consumer;
  const int num_rows = Config::kSwap ? output.n : output.m;
  const int num_cols = Config::kSwap ? output.m : output.n;
  auto& shared_bias = shared.bias[consumer];
  PipelineState<Config::kNumStages> position;
  int tile_consumer = 1;                // with kPingpong: the consumer of this tile
  uint32_t turn_phase = consumer == 0;  // consumer 0 begins at once
  for (uint32_t i = schedule.first(); i < schedule.size(); i += schedule.step()) {
    const WorkItem work = schedule[i];
    const int num_k = work.k_end - work.k_begin;
    if constexpr (Config::kPingpong) {
      tile_consumer ^= 1;
      if (tile_consumer != consumer) {
        skip(position, num_k);
        continue;
      }
      shared.turn[consumer].wait(turn_phase);
      turn_phase ^= 1;
    }
    const int row = schedule.row_of(work.tile) + (Config::kPingpong ? 0 : consumer * Config::kRows);
    const int col = schedule.col_of(work.tile);
    TileBias<typename Config::T, Config::kTileBias> bias(output.bias, Config::kSwap ? row : col,
                                                         output.n);
    typename Config::Accumulators sums;
    accumulate<Config>(shared, schedule.rank, position, sums, consumer, num_k);
    bias.store(shared_bias);
    if constexpr (Config::kSplit) {
      const int slot =
          (work.split_tile * Config::kClusterSize + schedule.rank) * Config::kConsumersPerTile +
          (Config::kPingpong ? 0 : consumer);
      const int rows_left = max(num_rows - row - warp_index() % 4 * 16, 0);
      const int cols_left = max(num_cols - col, 0);
      const int64_t first = static_cast<int64_t>(slot) * kTileSums * schedule.list.num_splits;
      if (work.split_tile >= 0 &&
          !reduce_splits(sums, partials + first, counters + slot, work.split,
                         schedule.list.num_splits, ceil_div(rows_left, kWgmmaM),
                         &shared.is_last[consumer], barrier, ceil_div(cols_left, 8) * 4)) {
        continue;
      }
    }
    store_tile<Config>(shared.chunks[consumer], sums, map_d, output, shared_bias, row, col,
                       barrier);
  }
  if (Config::kTmaStore) wait_stores_read<0>();
}

// The kernels' body. `a` and `b` are the operands of what is tiled, with kSwap B and A. With kSplit
// all tiles but the first `num_whole_tiles` are computed in `num_splits` splits. `map_d` is read
// only with kTmaStore, `partials` (split tiles, num_splits, BLOCK_M * BLOCK_N) and `counters`
// (split tiles, kConsumersPerTile), zeros, only with kSplit.
template <typename Config, typename Operand>
__device__ __forceinline__ void multiply_by_wgmma(const Operand& a, const Operand& b,
                                                  const TensorMap& map_d,
                                                  const typename Config::Output& output,
                                                  float* partials, uint32_t* counters, int k,
                                                  int num_whole_tiles, int num_splits,
                                                  int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<WgmmaShared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls: values that live across setmaxnreg were seen to spill.
  const auto schedule = [&] {
    return BlockSchedule<Config>::of(output.m, output.n, k, num_whole_tiles, num_splits, group_m);
  };

  if (threadIdx.x == 0) {
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) {
      barrier.init(Config::kNumSharers * Config::kConsumersPerTile * 4);
    }
    for (Barrier& barrier : shared.turn) barrier.init(4);
    fence_barrier_init();
    if (Config::kTmaStore) prefetch_map(map_d);
  }
  __syncwarp();
  const int warp = warp_index();
  const bool is_producer = warp == Config::kNumConsumers * 4;
  StartedSchedule<Config> started;
  if (is_producer) {
    if (elect_one()) {
      prefetch(a);
      prefetch(b);
    }
    started = StartedSchedule<Config>(schedule());
  }
  __syncthreads();
  if constexpr (Config::kClusterSize > 1) cluster_arrive_relaxed();

  if (warp / 4 == Config::kNumConsumers) {
    if constexpr (Config::kReallocate) decrease_registers<Config::kProducerRegisters>();
    if (is_producer && elect_one()) {
      grid_dependency_wait();
      produce_operands<Config>(shared, started, a, b, cluster_wait);
    }
  } else {
    if constexpr (Config::kReallocate) increase_registers<Config::kConsumerRegisters>();
    if constexpr (Config::kClusterSize > 1) cluster_wait();
    grid_dependency_wait();
    consume<Config>(shared, schedule(), map_d, output, partials, counters);
  }
}

}  // namespace kernelcat
