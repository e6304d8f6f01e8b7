// D = activation(A @ W^T + bias) for many rows of A on Hopper, as D^T = W A^T: a persistent kernel
// in which one thread fills a ring with packed weights and rows of A, and two warpgroups decode the
// former into the registers from which wgmma takes its left operand.
//
// Weights as wgmma's operand in registers are Machete's (vLLM) and CUTLASS's mixed-input kernels';
// the order of work is gemm's.
#include "wgmma_result.cuh"
#include "wgmma_tile.cuh"

namespace kernelcat {

// A warp's tile of W: a lane's codes, and its two rows' scales.
template <typename Config>
struct PackedTile {
  using Scales = GroupScales<typename Config::T, Config::kNvfp4>;
  uint4 words;
  typename Scales::Raw raw;

  __device__ __forceinline__ PackedTile(const Fp4WgmmaStage<Config>& stage, int row, int tile)
      : words(reinterpret_cast<const uint4*>(stage.codes[row][tile])[lane_index()]),
        raw(reinterpret_cast<const typename Scales::Raw*>(
            stage.scales[row][tile])[lane_index() / 4]) {}

  // The left operands of a tile's four steps.
  __device__ __forceinline__ void decode_into(uint32_t (&operands)[kTileSteps][4]) const {
    using T = typename Config::T;
    constexpr bool kNvfp4 = Config::kNvfp4;
    const Scales decoded(raw);
    TileScales<kNvfp4> scales;
#pragma unroll
    for (int i = 0; i < TileScales<kNvfp4>::kWords; ++i) scales.pairs[i] = decoded.pairs[i];
    decode<T, kNvfp4, 0>(operands[0], words.x, scales);
    decode<T, kNvfp4, 1>(operands[1], words.y, scales);
    decode<T, kNvfp4, 2>(operands[2], words.z, scales);
    decode<T, kNvfp4, 3>(operands[3], words.w, scales);
  }
};

// Starts a tile's products; `a` describes 64 columns of A.
template <typename Config>
__device__ __forceinline__ void multiply_tile(typename Config::Sums& sums,
                                              uint32_t (&operands)[kTileSteps][4], uint64_t a,
                                              bool accumulate) {
  pin(sums);
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) pin_operand(operands[s]);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) {
    WgmmaWeights<typename Config::T, Config::BLOCK_N>::multiply(
        sums, operands[s], advanced(a, s * kWgmmaK * 2), accumulate || s > 0);
  }
  wgmma_commit();
  pin(sums);
}

// A warp is done with a stage; what it read by ordinary loads is behind it for the copy engine too.
__device__ __forceinline__ void release_stage(Barrier& empty) {
  fence_async_shared();
  __syncwarp();
  if (lane_index() == 0) empty.arrive();
}

// A warp's tiles of W in a stage.
template <typename Config>
struct PackedStage {
  PackedTile<Config> tiles[Config::kStageTiles];

  __device__ __forceinline__ PackedStage(const Fp4WgmmaStage<Config>& stage, int row)
      : tiles{{stage, row, 0}, {stage, row, 1}} {}
};

// One tile of D^T: weights are decoded while the products of those before run.
template <typename Config>
__device__ __forceinline__ void accumulate(Fp4WgmmaShared<Config>& shared,
                                           PipelineState<Config::kNumStages>& position,
                                           typename Config::Sums& sums,
                                           const KRange<Config>& range) {
  uint32_t operands[Config::kStageTiles][kTileSteps][4];
  const int row = threadIdx.x / kWarpThreads;
  const auto packed_stage = [&] {
    shared.full[position.stage].wait(position.phase);
    return PackedStage<Config>(shared.stages[position.stage], row);
  };
  PackedStage<Config> packed = packed_stage();
  int previous = 0;
  for (int block = range.begin; block < range.end; ++block) {
    const int stage = position.stage;
    position.advance();
#pragma unroll
    for (int t = 0; t < Config::kStageTiles; ++t) {
      packed.tiles[t].decode_into(operands[t]);
      const uint32_t a = shared_address(shared.stages[stage].a[t]);
      multiply_tile<Config>(sums, operands[t], swizzled_rows_descriptor(a),
                            t > 0 || block > range.begin);
      if (t == Config::kStageTiles - 1 && block + 1 < range.end) packed = packed_stage();
      wgmma_wait<1>();
#pragma unroll
      for (int s = 0; s < kTileSteps; ++s) pin_operand(operands[1 - t][s]);
      if (t == 0 && block > range.begin) release_stage(shared.empty[previous]);
    }
    previous = stage;
  }
  wgmma_wait<0>();
  pin(sums);
  release_stage(shared.empty[previous]);
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
  schedule.for_each([&](const Work& work, int first_row, int col) {
    typename Config::Sums sums;
    accumulate<Config>(shared, position, sums, KRange<Config>(work, rank));
    if constexpr (Config::kSplitK > 1) {
      const int num_live = ceil_div(output.m - col, 8 * Groups::kBlocks);
      shared.inboxes[consumer].add_up(sums, rank, min(num_live, Groups::kGroups));
    }
    store_transposed<Config::BLOCK_N>(sums, output, scale, first_row + consumer * kWgmmaM, col,
                                      [&](int group) { return Groups::is_own(group, rank); });
  });
}

template <typename T, typename TOut, bool kNvfp4, Activation kActivation, bool kRowScale,
          int BLOCK_N, int kNumStages, int kSplitK,
          typename Config =
              Fp4WgmmaTile<T, TOut, kNvfp4, kActivation, kRowScale, BLOCK_N, kNumStages, kSplitK>>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    nvfp4_matmul_wgmma(const __grid_constant__ TensorMap map_a,
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
  const auto schedule = [&] { return BlockSchedule<Config>::of(m, n, k, 0, 1, group_m); };

  const Fp4Maps maps = {map_a, map_w, map_scales};
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
    consume<Config>(shared, schedule(), {d, global_scale, a_scale, bias, m, n});
  }
}

}  // namespace kernelcat
