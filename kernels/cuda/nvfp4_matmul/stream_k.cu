// D = activation(A @ W^T + bias) for many rows of A on Hopper by stream-K: the ring, the products
// and the stores of the wgmma kernel, and tiles of the last waves dealt out by k-blocks, as in
// gemm/stream_k.cu.
//
// barrier     | who arrives (how many)               | who waits   | for what
// full[s]     | producer, with the stage's bytes (1) | consumers   | stage s holds its k-block
// empty[s]    | consumer warps (8)                   | producer    | stage s has been read
// named 1 + c | threads of consumer c (128)          | consumer c  | its flag
#include <kernelcat/stream_k.cuh>

#include "wgmma.cu"

namespace kernelcat {

template <typename Tile>
struct KRange<StreamTile<Tile>> {
  int begin, end;

  __device__ __forceinline__ KRange(const WorkItem& work, int)
      : begin(work.k_begin), end(work.k_end) {}
};

// Nothing is received from a cluster.
template <typename Tile>
struct SumInbox<StreamTile<Tile>, 1> {
  uint32_t is_last;
};

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume_streamed(Fp4WgmmaShared<Config>& shared,
                                                 const BlockSchedule<Config>& schedule,
                                                 const typename Config::Output& output,
                                                 float* partials, uint32_t* counters) {
  const int consumer = warp_index() / 4;
  const float scale = output.global() * kGrowth<Config::kNvfp4>;
  PipelineState<Config::kNumStages> position;
  schedule.for_each([&](const WorkItem& work, int tile_row, int col) {
    const int row = tile_row + consumer * kWgmmaM;
    typename Config::Sums sums[1];
    accumulate<Config>(shared, position, sums[0], KRange<Config>(work, 0));
    if (work.split_tile >= 0) {
      const bool is_inside = row + warp_index() % 4 * 16 < output.n;
      const int num_sums = ceil_div(max(output.m - col, 0), 8) * 4;
      if (!add_up_sharers(sums, schedule.shared_tile(work, consumer, partials, counters), is_inside,
                          num_sums, &shared.inboxes[consumer].is_last, 1 + consumer)) {
        return;
      }
    }
    store_transposed<Config::BLOCK_N>(sums[0], output, scale, row, col, [](int) { return true; });
  });
}

template <typename T, typename TOut, bool kNvfp4, Activation kActivation, bool kRowScale,
          int BLOCK_N, int kNumStages,
          typename Config = StreamTile<
              Fp4WgmmaTile<T, TOut, kNvfp4, kActivation, kRowScale, BLOCK_N, kNumStages, 1>>>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    nvfp4_matmul_stream_k(const __grid_constant__ TensorMap map_a,  // see Fp4Maps
                          const __grid_constant__ TensorMap map_w,
                          const __grid_constant__ TensorMap map_scales,
                          const float* global_scale,  // (1,), or null for MXFP4
                          const float* a_scale,       // (m,), or null for A of 16 bits
                          const TOut* bias,           // (n,) or null
                          TOut* d,                    // (m, n), or (m, n / 2) for kSwiglu
                          float* partials,     // (num_streamed + gridDim.x - 1, 128 * BLOCK_N)
                          uint32_t* counters,  // (num_streamed, kNumConsumers), zeros
                          int m, int n, int k, int num_streamed, int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<Fp4WgmmaShared<Config>*>(dynamic_shared + padding);
  const auto schedule = [&] { return BlockSchedule<Config>::of(m, n, k, num_streamed, group_m); };

  const Fp4Maps maps = {.a = map_a, .w = map_w, .scales = map_scales};
  if (threadIdx.x == 0) {
    maps.prefetch();
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) barrier.init(Config::kNumConsumers * 4);
    fence_barrier_init();
  }
  __syncthreads();
  grid_dependency_wait();

  if (warp_index() / 4 == Config::kNumConsumers) {
    decrease_registers<Config::kProducerRegisters>();
    if (threadIdx.x == Config::kNumConsumers * kWarpgroupThreads) {
      produce<Config>(shared, schedule(), maps);
    }
  } else {
    increase_registers<Config::kRegisters>();
    consume_streamed<Config>(
        shared, schedule(),
        {.d = d, .global_scale = global_scale, .a_scale = a_scale, .bias = bias, .m = m, .n = n},
        partials, counters);
  }
}

}  // namespace kernelcat
