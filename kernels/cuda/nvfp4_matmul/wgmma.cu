// D = activation(A @ W^T + bias) for many rows of A on Hopper, as D^T = W A^T: a persistent kernel
// in which one thread fills a ring with packed weights and rows of A, and two consumer warpgroups
// decode the weights to registers, from which wgmma takes its left operand.
//
// Weights as wgmma's operand in registers are those of Machete (vLLM) and of CUTLASS's mixed-input
// kernels; the order of tiles is gemm's.
//
// barrier    | who arrives (how many)               | who waits   | for what
// full[s]    | producer, with the stage's bytes (1) | consumers   | stage s holds its k-block
// empty[s]   | consumer warps (8)                   | producer    | stage s has been read
// arrived[c] | a thread of consumer c (1)           | consumer c  | partial sums from the cluster
// cluster    | all threads, at the start            | all threads | all mbarriers, see below
//
// arrived[c] is in inbox c, and counts the bytes that the cluster's other thread blocks store
// there. The cluster barrier, with kSplitK > 1 only, separates the initialisation of mbarriers from
// their first use. At the end none is needed: a thread block waits for all stores into its own
// inboxes.
#include <kernelcat/packed_tile.cuh>
#include <kernelcat/stage_release.cuh>
#include <kernelcat/transposed_sums.cuh>

#include "output.cuh"
#include "wgmma_tile.cuh"

namespace kernelcat {

// A lane's part of the two tiles of W in a stage that its warp multiplies.
template <typename Config>
struct PackedStage {
  PackedTile<typename Config::T, Config::kNvfp4> tiles[Config::kStageTiles];

  __device__ __forceinline__ PackedStage(const Fp4WgmmaStage<Config>& stage, int row)
      : tiles{{stage.codes[row][0], stage.scales[row][0]},
              {stage.codes[row][1], stage.scales[row][1]}} {}
};

// Gives the last stage of a tile back at once.
struct ReleaseLast {
  static constexpr bool kHolds = false;
};

// Multiplies one tile of D^T. Weights are decoded while the wgmmas of earlier weights run. `last`
// is told when the first products are done and which stage is the last one, if it holds that stage.
template <typename Config, typename Last = ReleaseLast>
__device__ __forceinline__ void accumulate(Fp4WgmmaShared<Config>& shared,
                                           PipelineState<Config::kNumStages>& position,
                                           typename Config::Sums& sums, const KRange<Config>& range,
                                           Last* last = nullptr) {
  uint32_t operands[Config::kStageTiles][kTileSteps][4];
  const int row = threadIdx.x / kWarpThreads;  // the warp's tile row of W in the stage
  const auto packed_stage = [&] {
    shared.full[position.stage].wait(position.phase);
    return PackedStage<Config>(shared.stages[position.stage], row);
  };
  PackedStage<Config> packed = packed_stage();
  int previous = 0;
  for (int k_block = range.begin; k_block < range.end; ++k_block) {
    const int stage = position.stage;
    position.advance();
#pragma unroll
    for (int t = 0; t < Config::kStageTiles; ++t) {
      packed.tiles[t].decode_into(operands[t]);
      const uint32_t a = shared_address(shared.stages[stage].a[t]);
      multiply_packed_tile<typename Config::T, Config::BLOCK_N>(
          sums, operands[t], swizzled_rows_descriptor(a), t > 0 || k_block > range.begin);
      if (t == Config::kStageTiles - 1 && k_block + 1 < range.end) packed = packed_stage();
      wgmma_wait<1>();
      pin(operands[1 - t]);
      if (t == 0 && k_block > range.begin) release_stage_after_loads(shared.empty[previous]);
      if constexpr (Last::kHolds) {
        if (t == 0 && k_block == range.begin) last->release(shared);
      }
    }
    previous = stage;
  }
  wgmma_wait<0>();
  pin(sums);
  if constexpr (Last::kHolds) {
    last->stage = previous;
  } else {
    release_stage_after_loads(shared.empty[previous]);
  }
}

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume(Fp4WgmmaShared<Config>& shared,
                                        const BlockSchedule<Config>& schedule,
                                        const typename Config::Output& output) {
  using Groups = SumGroups<Config>;
  const int consumer = warp_index() / 4, rank = schedule.rank;
  const float scale = output.global() * kGrowth<Config::kNvfp4>;
  PipelineState<Config::kNumStages> position;
  schedule.for_each([&](const WorkItem& work, int first_row, int col) {
    typename Config::Sums sums;
    accumulate<Config>(shared, position, sums, KRange<Config>(work, rank));
    if constexpr (Config::kSplitK > 1) {
      const int num_groups = ceil_div(output.m - col, 8 * Groups::kBlocks);
      shared.inboxes[consumer].add_up(sums, rank, min(num_groups, Groups::kGroups));
    }
    store_transposed<Config::BLOCK_N>(sums, output, scale, first_row + consumer * kWgmmaM, col,
                                      [&](int group) { return Groups::is_owned(group, rank); });
  });
}

template <typename T, typename TOut, bool kNvfp4, Activation kActivation, bool kRowScale,
          int BLOCK_N, int kNumStages, int kSplitK,
          typename Config =
              Fp4WgmmaTile<T, TOut, kNvfp4, kActivation, kRowScale, BLOCK_N, kNumStages, kSplitK>>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    nvfp4_matmul_wgmma(const __grid_constant__ TensorMap map_a,  // see Fp4Maps
                       const __grid_constant__ TensorMap map_w,
                       const __grid_constant__ TensorMap map_scales,
                       const float* global_scale,  // (1,), or null for MXFP4
                       const float* a_scale,       // (m,), or null for A of 16 bits
                       const TOut* bias,           // (n,) or null
                       TOut* d,                    // (m, n), or (m, n / 2) for kSwiglu
                       int m, int n, int k, int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<Fp4WgmmaShared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls, as in gemm/wgmma.cu.
  const auto schedule = [&] { return BlockSchedule<Config>::of(m, n, k, 0, 1, group_m); };

  const Fp4Maps maps = {.a = map_a, .w = map_w, .scales = map_scales};
  if (threadIdx.x == 0) {
    maps.prefetch();
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) barrier.init(Config::kNumConsumers * 4);
    if constexpr (kSplitK > 1) {
      for (auto& inbox : shared.inboxes) inbox.arrived.init(1);
    }
    fence_barrier_init();
  }
  if constexpr (kSplitK > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }
  grid_dependency_wait();

  if (warp_index() / 4 == Config::kNumConsumers) {
    decrease_registers<Config::kProducerRegisters>();
    if (threadIdx.x == Config::kNumConsumers * kWarpgroupThreads) {
      produce<Config>(shared, schedule(), maps);
    }
  } else {
    increase_registers<Config::kRegisters>();
    consume<Config>(
        shared, schedule(),
        {.d = d, .global_scale = global_scale, .a_scale = a_scale, .bias = bias, .m = m, .n = n});
  }
}

}  // namespace kernelcat
