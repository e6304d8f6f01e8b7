// `wgmma`, whose tiles of D leave by bulk copies while the next ones are multiplied: for several
// waves of tiles with few k-blocks. A tile leaves through the boxes of A of its last stage, which
// are exactly as large as it. So no shared memory is set aside for D, and the ring has as many
// stages.
//
// barrier      | who arrives (how many)               | who waits      | for what
// full[s]      | producer, with the stage's bytes (1) | consumers      | stage s holds its k-block
// empty[s]     | consumer warps (8)                   | producer       | stage s has been read, and
//              |                                      |                | its tile of D has left
// barrier 1    | both consumers                       | both consumers | the last stage is read
// barrier 2, 3 | a consumer                           | its thread 0   | the consumer's box is
// written
#include "wgmma.cu"

namespace kernelcat {

// The stage whose boxes of A a tile of D leaves through: it was the tile's last one, and the
// producer gets it back when the bulk copy has read it.
struct HeldStage {
  static constexpr bool kHolds = true;
  int stage = -1;

  template <typename Config>
  __device__ __forceinline__ void release(Fp4WgmmaShared<Config>& shared) {
    if (stage < 0) return;
    if (threadIdx.x % kWarpgroupThreads == 0) wait_stores_read<0>();
    release_stage_after_loads(shared.empty[stage]);
  }
};

// Both consumers' sums leave through the boxes of A of `stage`, each through one.
template <typename Config>
__device__ __forceinline__ void store_box(Fp4WgmmaStage<Config>& stage,
                                          const typename Config::Sums& sums, const TensorMap& map_d,
                                          const typename Config::Output& output, float scale,
                                          int row, int col) {
  const int consumer = warp_index() / 4;
  uint8_t* box = stage.a[consumer];
  named_barrier_sync(1, Config::kNumConsumers * kWarpgroupThreads);  // both have read the stage
  write_box<Config::BLOCK_N>(box, sums, output, scale, row, col);
  fence_async_shared();
  named_barrier_sync(2 + consumer, kWarpgroupThreads);
  if (threadIdx.x % kWarpgroupThreads == 0) {
    if (row < output.d_cols()) tensor_store(map_d, box, row, col, kDefaultPolicy);
    commit_stores();
  }
}

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume_to_boxes(Fp4WgmmaShared<Config>& shared,
                                                 const BlockSchedule<Config>& schedule,
                                                 const TensorMap& map_d,
                                                 const typename Config::Output& output) {
  const float scale = output.global() * kGrowth<Config::kNvfp4>;
  PipelineState<Config::kNumStages> position;
  HeldStage held;
  schedule.for_each([&](const WorkItem& work, int first_row, int col) {
    const int row = first_row + warp_index() / 4 * kWgmmaM;
    typename Config::Sums sums;
    accumulate(shared, position, sums, KRange<Config>(work, 0), &held);
    store_box<Config>(shared.stages[held.stage], sums, map_d, output, scale, row, col);
  });
  if (threadIdx.x % kWarpgroupThreads == 0) wait_stores_read<0>();
}

template <
    typename T, typename TOut, bool kNvfp4, Activation kActivation, bool kRowScale, int BLOCK_N,
    int kNumStages,
    typename Config = Fp4WgmmaTile<T, TOut, kNvfp4, kActivation, kRowScale, BLOCK_N, kNumStages, 1>>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    nvfp4_matmul_boxes(const __grid_constant__ TensorMap map_a,  // see Fp4Maps
                       const __grid_constant__ TensorMap map_w,
                       const __grid_constant__ TensorMap map_scales,
                       const __grid_constant__ TensorMap map_d,  // (m, n), boxes BLOCK_N x 64
                       const float* global_scale,                // (1,), or null for MXFP4
                       const float* a_scale,                     // (m,), or null for A of 16 bits
                       const TOut* bias,                         // (n,) or null
                       int m, int n, int k, int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<Fp4WgmmaShared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls, as in gemm/wgmma.cu.
  const auto schedule = [&] { return BlockSchedule<Config>::of(m, n, k, 0, 1, group_m); };

  const Fp4Maps maps = {.a = map_a, .w = map_w, .scales = map_scales};
  if (threadIdx.x == 0) {
    maps.prefetch();
    prefetch_map(map_d);
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
    consume_to_boxes<Config>(
        shared, schedule(), map_d,
        {.global_scale = global_scale, .a_scale = a_scale, .bias = bias, .m = m, .n = n});
  }
}

}  // namespace kernelcat
