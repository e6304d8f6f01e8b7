// Rows of A, grouped by expert, times their expert's weights on Hopper: a persistent kernel in
// which a producer warpgroup fills a ring of stages, and one or two consumer warpgroups multiply
// from the ring by wgmma. With kTurns two consumers take turns, a tile each (CUTLASS's ping-pong).
//
// Grouped products over ragged segments whose tiles every thread block finds from the segments'
// offsets are those of MegaBlocks (Gale et al. 2022) and CUTLASS's grouped GEMM. The roles of warps
// are those of gemm/wgmma.cu. With kPairs a cluster of two thread blocks computes two tiles at a
// time. Where both need the same weights, each loads half of them and multicasts the half to both,
// as CUTLASS does; rows of A are of one thread block.
//
// barrier     | who arrives (how many)                  | who waits   | for what
// full[s]     | a producer thread, with TMA's bytes (1) | consumers   | stage s holds its k-block
//             | and all threads that copy by cp.async   |             |
//             | (kCopyingThreads)                       |             |
// empty[s]    | warps that read the stage, in all       | producer    | stage s has been read in
// all
//             | thread blocks of the cluster            |             | thread blocks
//             | (kClusterSize * kConsumersPerTile * 4)  |             |
// turns()[c]  | warps of the other consumer (4)         | consumer c  | all stages before the
// tile's
//             |                                         |             | have been full, with kTurns
// named 1 + c | threads of consumer c (128)             | consumer c  | the tile's bias
// cluster     | all threads, at start and end           | all threads | mbarriers, with kPairs:
// their
//             |                                         |             | initialisation precedes the
//             |                                         |             | use by the other thread
//             block, |                                         |             | and that precedes
//             the end
//
// Bytes of full[s] that the other thread block sends may land before this one's arrival, but not
// before the phase: the other one sends them after stage s has been read in both.
#include <kernelcat/pdl.cuh>
#include <kernelcat/skip_stages.cuh>

#include "accumulate.cuh"
#include "output.cuh"
#include "producer.cuh"

namespace kernelcat {

// Passes over one tile of which this consumer has no rows.
template <typename Config>
__device__ __forceinline__ void pass_over(ExpertShared<Config>& shared,
                                          PipelineState<Config::kNumStages>& position, int num_k) {
  for (int k_block = 0; k_block < num_k; ++k_block) {
    shared.full[position.stage].wait(position.phase);
    release_stage<Config::kClusterSize>(shared.empty[position.stage]);
    position.advance();
  }
}

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume(ExpertShared<Config>& shared,
                                        const typename Config::Tiles& tiles,
                                        const ExpertOutput<Config>& output, int num_k) {
  const int consumer = warp_index() / 4, first_row = Config::kTurns ? 0 : consumer * Config::kRows;
  PipelineState<Config::kNumStages> position;
  int tile_consumer = 1;                // with kTurns: the consumer of this tile
  uint32_t turn_phase = consumer == 0;  // consumer 0 begins at once
  tiles.for_each([&](const ExpertTile& tile) {
    if constexpr (Config::kTurns) {
      tile_consumer ^= 1;
      if (tile_consumer != consumer) {
        skip(position, num_k);
        return;
      }
      shared.turns()[consumer].wait(turn_phase);
      turn_phase ^= 1;
    } else if (first_row >= tile.num_rows) {
      pass_over<Config>(shared, position, num_k);
      return;
    }
    const bool has_bias = output.bias != nullptr;
    TileBias<Config::BLOCK_N> bias(
        has_bias ? output.bias + static_cast<int64_t>(tile.expert) * output.n : nullptr, tile.col,
        output.n);
    typename Config::Sums sums;
    accumulate<Config>(shared, position, sums, tile, first_row, num_k);
    bias.store(shared.bias[consumer], 1 + consumer);
    store_sums<Config>(sums, output, shared.bias[consumer], tile, first_row);
  });
}

template <typename T, typename Element, int BLOCK_M, int BLOCK_N, int kNumStages, Gating kGating,
          bool kGather, bool kAtomic, bool kTurns, bool kPairs,
          typename Config = ExpertTileConfig<T, Element, BLOCK_M, BLOCK_N, kNumStages, kGating,
                                             kGather, kAtomic, kTurns, kPairs>>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    moe_gemm_wgmma(const __grid_constant__ TensorMap map_a,  // (rows, k), boxes BLOCK_M high; read
                                                             // without kGather
                   const __grid_constant__ TensorMap map_w,  // (experts * n, k), BLOCK_N high,
                                                             // with kPairs half as high
                   const Element* a,                         // (tokens, k), read with kGather
                   const float* a_scale,                     // (k / 128, a_rows), or null
                   const float* w_scale,                     // (experts, n / 128, k / 128), or null
                   const T* bias,                            // (experts, n), or null
                   const int* offsets,                       // (experts + 1,)
                   const int* order,                         // (rows,)
                   const float* gates,                       // (rows,), read with kAtomic
                   void* out,  // T (rows, pitch); with kAtomic float (tokens, pitch)
                   int rows, int a_rows, int top_k, int experts, int n, int k, int pitch,
                   int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<ExpertShared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls: values that live across setmaxnreg were seen to spill.
  const auto tiles = [&]() -> typename Config::Tiles {
    return {.offsets = shared.lists(),
            .before = shared.lists() + experts + 1,
            .experts = experts,
            .num_n = ceil_div(n, BLOCK_N),
            .group_m = group_m};
  };

  if (threadIdx.x == 0) {
    if (!kGather) prefetch_map(map_a);
    prefetch_map(map_w);
    for (Barrier& barrier : shared.full) barrier.init(1 + Config::kCopyingThreads);
    for (Barrier& barrier : shared.empty) {
      barrier.init(Config::kClusterSize * Config::kConsumersPerTile * 4);
    }
    for (int c = 0; c < (kTurns ? 2 : 0); ++c) shared.turns()[c].init(4);
    fence_barrier_init();
  }
  if constexpr (kPairs) cluster_arrive_relaxed();
  grid_dependency_wait();
  tiles().load(offsets);
  __syncthreads();
  if constexpr (kPairs) cluster_wait();

  const int num_k = ceil_div(k, Config::BLOCK_K);
  const int role = warp_index();  // outside the branches: all lanes must call warp_index()
  if (role / 4 == Config::kNumConsumers) {
    if constexpr (Config::kReallocate) decrease_registers<Config::kProducerRegisters>();
    if (Config::kCopyingThreads > 0 || role % 4 == 0) {
      const ScaleSource scales = {.a_scale = a_scale,
                                  .b_scale = w_scale,
                                  .m = a_rows,
                                  .num_n = ceil_div(n, kScaleBlock),
                                  .num_k = num_k};
      const CopySource source = {
          .a = reinterpret_cast<const uint4*>(a),
          .order = order,
          .scales = scales,
          .top_k = static_cast<uint32_t>(top_k),
          .row_vectors = k / static_cast<int>(kVectorBytes / sizeof(Element))};
      produce<Config>(shared, tiles(), map_a, map_w, source, n, num_k);
    }
    launch_dependents();
  } else {
    if constexpr (Config::kReallocate) increase_registers<Config::kConsumerRegisters>();
    const bool is_aligned = pitch % 8 == 0 && kernelcat::is_aligned(out, 16);
    const ExpertOutput<Config> output = {.rows = out,
                                         .bias = bias,
                                         .order = order,
                                         .gates = gates,
                                         .top_k = static_cast<uint32_t>(top_k),
                                         .n = n,
                                         .pitch = pitch,
                                         .is_aligned = is_aligned};
    if constexpr (!kAtomic) {
      output.clear(tiles().num_rows(), rows, threadIdx.x,
                   Config::kNumConsumers * kWarpgroupThreads);
    }
    consume<Config>(shared, tiles(), output, num_k);
  }
  // A thread block must not exit while the other one may still arrive at its barriers.
  if constexpr (kPairs) cluster_sync();
}

}  // namespace kernelcat
