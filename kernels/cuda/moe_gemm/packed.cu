// Rows of A, grouped by expert, times their expert's packed 4-bit weights on Hopper, as
// D^T = W A^T: a persistent kernel in which producers fill a ring of stages, and consumers decode
// the weights to registers, from which wgmma takes its left operand.
//
// Tiles are found as in wgmma.cu; weights in registers are those of nvfp4_matmul/wgmma.cu, after
// Machete (vLLM).
//
// barrier  | who arrives (how many)                  | who waits | for what
// full[s]  | a producer thread, with TMA's bytes (1) | consumers | stage s holds its k-block
//          | and all threads that copy by cp.async   |           |
//          | (kCopyingThreads)                       |           |
// empty[s] | consumer warps (4 or 8)                 | producer  | stage s has been read
#include <kernelcat/packed_tile.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/stage_release.cuh>
#include <kernelcat/transposed_sums.cuh>

#include "output.cuh"
#include "packed_stage.cuh"

namespace kernelcat {

// What becomes of the sums of a tile's rows, an `Output` of TransposedSums.
template <typename T_, Gating kGating>
struct PackedOutput {
  using T = T_;
  static constexpr bool kPaired = kIsGated<kGating>;
  // Four 8 x 8 matrices of D make rows of 16 bytes. A block of 8 rows of A has two of them; with
  // kPaired one, because two rows of W make one column of D.
  static constexpr int kStoredBlocks = kPaired ? 4 : 2;

  T* d;           // the tile's first row
  const T* bias;  // (n,), or null
  int m, n;       // rows of the tile, and rows of the expert's weights

  __device__ __forceinline__ int d_cols() const { return kPaired ? n / 2 : n; }
  static __device__ __forceinline__ float row_scale(float scale, int row) { return scale; }
  __device__ __forceinline__ float bias_at(int col) const {
    return bias == nullptr || col >= n ? 0.0f : to_float(bias[col]);
  }
  static __device__ __forceinline__ float activated(float z) { return z; }
  static __device__ __forceinline__ float gated(float gate, float up) {
    return kernelcat::gated<kGating>(gate, up);
  }
};

// Multiplies one tile of D^T. A warp multiplies one tile of W after the other: first those of the
// same columns. Weights are decoded while the wgmmas of the weights before run.
template <typename Config>
__device__ __forceinline__ void accumulate_packed(PackedShared<Config>& shared,
                                                  PipelineState<Config::kNumStages>& position,
                                                  typename Config::Sums& sums, int num_k) {
  using Tile = PackedTile<typename Config::T, Config::kNvfp4, true>;
  constexpr int kBlocks = Config::kRowBlocks, kNumTiles = Config::kStageTiles * kBlocks;
  struct Tiles {
    Tile tiles[kNumTiles];
  };
  uint32_t operands[2][kTileSteps][4];
  const int warp = threadIdx.x / kWarpThreads;
  const int first_row = warp / 4 * 4 * kBlocks + warp % 4;  // the warp's first tile row of W
  const auto next = [&]() -> Tiles {
    shared.full[position.stage].wait(position.phase);
    if constexpr (Config::kGather) fence_async_shared();  // cp.async wrote what wgmma reads
    const auto& stage = shared.stages[position.stage];
    Tiles result;
#pragma unroll
    for (int i = 0; i < kNumTiles; ++i) {
      const int row = first_row + i % kBlocks * 4;
      result.tiles[i] = {stage.codes[row][i / kBlocks], stage.scales[row][i / kBlocks]};
    }
    return result;
  };
  Tiles packed = next();
  int previous = 0;
  for (int k_block = 0; k_block < num_k; ++k_block) {
    const int stage = position.stage;
    position.advance();
#pragma unroll
    for (int i = 0; i < kNumTiles; ++i) {
      auto& decoded = operands[i % 2];
      packed.tiles[i].decode_into(decoded);
      const uint32_t a = shared_address(shared.stages[stage].a[i / kBlocks]);
      multiply_packed_tile<typename Config::T, Config::BLOCK_M>(
          sums[i % kBlocks], decoded, swizzled_rows_descriptor(a), i >= kBlocks || k_block > 0);
      if (i == kNumTiles - 1 && k_block + 1 < num_k) packed = next();
      wgmma_wait<1>();
      pin(operands[1 - i % 2]);
      if (i == 0 && k_block > 0) release_stage<1>(shared.empty[previous]);
    }
    previous = stage;
  }
  wgmma_wait<0>();
  pin(sums);
  release_stage<1>(shared.empty[previous]);
}

// Runs in a consumer warpgroup. `d` is (rows, columns of D), `bias` (experts, n) or null.
template <typename Config>
__device__ __forceinline__ void consume_packed(PackedShared<Config>& shared,
                                               const typename Config::Tiles& tiles,
                                               typename Config::T* d,
                                               const typename Config::T* bias,
                                               const float* global_scale, int n, int num_k) {
  using T = typename Config::T;
  const int consumer = warp_index() / 4;
  PipelineState<Config::kNumStages> position;
  tiles.for_each([&](const ExpertTile& tile) {
    typename Config::Sums sums;
    accumulate_packed<Config>(shared, position, sums, num_k);
    const float scale =
        (Config::kNvfp4 ? global_scale[tile.expert] : 1.0f) * kGrowth<Config::kNvfp4>;
    PackedOutput<T, Config::kGating> output = {
        .d = d,
        .bias = bias == nullptr ? nullptr : bias + static_cast<int64_t>(tile.expert) * n,
        .m = tile.num_rows,
        .n = n};
    output.d += static_cast<int64_t>(tile.row) * output.d_cols();
#pragma unroll
    for (int block = 0; block < Config::kRowBlocks; ++block) {
      const int col = tile.col + (consumer * Config::kRowBlocks + block) * kWgmmaM;
      store_transposed<Config::BLOCK_M>(sums[block], output, scale, col, 0,
                                        [](int group) { return true; });
    }
  });
}

template <typename T, bool kNvfp4, int BLOCK_M, int kNumStages, Gating kGating, bool kGather,
          typename Config = PackedConfig<T, kNvfp4, BLOCK_M, kNumStages, kGating, kGather>>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kBlocksPerSm)
    moe_gemm_packed(const __grid_constant__ TensorMap map_a,       // see PackedMaps
                    const __grid_constant__ TensorMap map_w,       //
                    const __grid_constant__ TensorMap map_scales,  //
                    const T* a,                                    // (tokens, k), read with kGather
                    const float* global_scale,                     // (experts,), or null for MXFP4
                    const T* bias,                                 // (experts, n), or null
                    const int* offsets,                            // (experts + 1,)
                    const int* order,                              // (rows,)
                    T* d,  // (rows, n), or (rows, n / 2) where it is gated
                    int rows, int top_k, int experts, int n, int k, int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<PackedShared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls, as in wgmma.cu.
  const auto tiles = [&]() -> typename Config::Tiles {
    return {.offsets = shared.lists(),
            .row_blocks = shared.lists() + experts + 1,
            .experts = experts,
            .num_n = ceil_div(n, Config::BLOCK_N),
            .group_m = group_m};
  };

  const PackedMaps maps = {.a = map_a, .w = map_w, .scales = map_scales};
  if (threadIdx.x == 0) {
    maps.template prefetch<kGather>();
    for (Barrier& barrier : shared.full) barrier.init(1 + Config::kCopyingThreads);
    for (Barrier& barrier : shared.empty) barrier.init(Config::kNumConsumers * 4);
    fence_barrier_init();
  }
  grid_dependency_wait();
  tiles().load(offsets);
  __syncthreads();

  const int num_k = ceil_div(k, Config::BLOCK_K);
  const int role = warp_index();  // outside the branches: all lanes must call warp_index()
  if (role >= Config::kNumConsumers * 4) {
    if constexpr (Config::kBlocksPerSm == 1) decrease_registers<Config::kProducerRegisters>();
    if (Config::kCopyingThreads > 0 || role == Config::kNumConsumers * 4) {
      const CopySource source = {.a = reinterpret_cast<const uint4*>(a),
                                 .order = order,
                                 .scales = {},
                                 .top_k = static_cast<uint32_t>(top_k),
                                 .row_vectors = k / static_cast<int>(kVectorBytes / sizeof(T))};
      produce_packed<Config>(shared, tiles(), maps, source, ceil_div(n, kTileRows), num_k);
    }
    launch_dependents();
  } else {
    if constexpr (Config::kBlocksPerSm == 1) increase_registers<Config::kConsumerRegisters>();
    const ExpertOutput<Config> all_rows = {
        .rows = d,
        .bias = nullptr,
        .n = n,
        .pitch = kIsGated<kGating> ? n / 2 : n,
        .is_aligned = n % (kIsGated<kGating> ? 16 : 8) == 0 && kernelcat::is_aligned(d, 16)};
    all_rows.clear(tiles().num_rows(), rows, threadIdx.x,
                   Config::kNumConsumers * kWarpgroupThreads);
    consume_packed<Config>(shared, tiles(), d, bias, global_scale, n, num_k);
  }
}

}  // namespace kernelcat
