// D = activation(A @ B^T + bias) + residual on Hopper by stream-K: the ring, the products and the
// stores of the wgmma kernel with two consumers, and tiles of the last waves dealt out by k-blocks.
//
// The hybrid of whole waves and streamed tiles is that of Osama et al. 2023 and of CUTLASS's
// stream-K scheduler. Streamed tiles come first: while consumers add up sums, the producer loads
// the next tile.
//
// barrier     | who arrives (how many)               | who waits   | for what
// full[s]     | producer, with the stage's bytes (1) | consumers   | stage s holds its k-block
// empty[s]    | consumer warps (8)                   | producer    | stage s has been read
// named 1 + c | threads of consumer c (128)          | consumer c  | its chunks, bias and is_last
#include <kernelcat/stream_k.cuh>

#include "wgmma_product.cuh"

namespace kernelcat {

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume_streamed(WgmmaShared<Config>& shared,
                                                 const BlockSchedule<Config>& schedule,
                                                 const TensorMap& map_d,
                                                 const typename Config::Output& output,
                                                 float* partials, uint32_t* counters) {
  const int consumer = warp_index() / 4, barrier = 1 + consumer;
  const int num_rows = Config::kSwap ? output.n : output.m;
  const int num_cols = Config::kSwap ? output.m : output.n;
  auto& shared_bias = shared.bias[consumer];
  PipelineState<Config::kNumStages> position;
  schedule.for_each([&](const WorkItem& work, int tile_row, int col) {
    const int row = tile_row + consumer * Config::kRows;
    TileBias<typename Config::T, Config::kTileBias> bias(output.bias, Config::kSwap ? row : col,
                                                         output.n);
    typename Config::Accumulators sums;
    accumulate<Config>(shared, schedule.rank, position, sums, consumer, work.k_end - work.k_begin);
    bias.store(shared_bias);
    if (work.split_tile >= 0) {
      const int rows_left = max(num_rows - row - warp_index() % 4 * 16, 0);
      const int num_sums = ceil_div(max(num_cols - col, 0), 8) * 4;
      if (!add_up_sharers(sums, schedule.shared_tile(work, consumer, partials, counters),
                          ceil_div(rows_left, kWgmmaM), num_sums, &shared.is_last[consumer],
                          barrier)) {
        return;
      }
    }
    store_tile<Config>(shared.chunks[consumer], sums, map_d, output, shared_bias, row, col,
                       barrier);
  });
  if (Config::kTmaStore) wait_stores_read<0>();
}

// m and n are those of Z. With kSwap the operands change places: map_a is B's and map_b A's.
// `map_d` is read only with kTmaStore.
template <
    typename T, int BLOCK_M, int BLOCK_N, int kNumStages, bool kSwap, bool kTmaStore,
    Activation kActivation, bool kResidual,
    typename Config = StreamTile<WgmmaTile<T, BLOCK_M, BLOCK_N, kNumStages, false, kSwap, 1, 1,
                                           true, kTmaStore, kActivation, kResidual, kRowBytes / 2>>>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    gemm_stream_k(const __grid_constant__ TensorMap map_a,  // (m, k), boxes BLOCK_M high
                  const __grid_constant__ TensorMap map_b,  // (n, k), boxes BLOCK_N high
                  const __grid_constant__ TensorMap map_d,  // d, boxes kChunkRows x kChunkCols
                  const T* bias,                            // (n,) or null
                  const T* residual,                        // (m, columns of d) or null
                  T* d,                                     // (m, n), or (m, n / 2) for kSwiglu
                  float* partials,     // (num_streamed + gridDim.x - 1, BLOCK_M * BLOCK_N)
                  uint32_t* counters,  // (num_streamed, kNumConsumers), zeros
                  int m, int n, int k, int num_streamed, int group_m) {
  static_assert(Config::kNumConsumers == 2);
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<WgmmaShared<Config>*>(dynamic_shared + padding);
  const auto schedule = [&] { return BlockSchedule<Config>::of(m, n, k, num_streamed, group_m); };

  if (threadIdx.x == 0) {
    prefetch_map(map_a);
    prefetch_map(map_b);
    if (kTmaStore) prefetch_map(map_d);
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) barrier.init(Config::kNumConsumers * 4);
    fence_barrier_init();
  }
  __syncthreads();
  grid_dependency_wait();

  if (warp_index() / 4 == Config::kNumConsumers) {
    decrease_registers<Config::kProducerRegisters>();
    if (warp_index() % 4 == 0 && elect_one())
      produce_operands<Config>(shared, schedule(), map_a, map_b);
  } else {
    increase_registers<Config::kConsumerRegisters>();
    consume_streamed<Config>(shared, schedule(), map_d,
                             {.d = d, .bias = bias, .m = m, .n = n, .residual = residual}, partials,
                             counters);
  }
}

}  // namespace kernelcat
