// Rows of A, grouped by expert, times their expert's weights of fewer bits (packed 4-bit codes, or
// float8) on Hopper, as D^T = W A^T: a persistent kernel in which producers fill a ring of stages,
// and consumers decode the weights to registers, from which wgmma takes its left operand.
//
// Tiles are found as in wgmma.cu; weights in registers are those of nvfp4_matmul/wgmma.cu, after
// Machete (vLLM).
//
// barrier  | who arrives (how many)                  | who waits | for what
// full[s]  | a producer thread, with TMA's bytes (1) | consumers | stage s holds its k-block
//          | and all threads that copy by cp.async   |           |
//          | (kCopyingThreads)                       |           |
// empty[s] | consumer warps (4, 8 or 12)               | producer  | stage s has been read
#include <kernelcat/pdl.cuh>
#include <kernelcat/transposed_sums.cuh>

#include "decoded_sums.cuh"
#include "float8_products.cuh"
#include "output.cuh"

namespace kernelcat {

// What becomes of the sums of a tile's rows, an `Output` of TransposedSums.
template <typename T_, Gating kGating, bool kGatesOnce_>
struct DecodedOutput {
  using T = T_;
  static constexpr bool kPaired = kIsGated<kGating>;
  // Four 8 x 8 matrices of D make rows of 16 bytes. A block of 8 rows of A has two of them; with
  // kPaired one, because two rows of W make one column of D.
  static constexpr int kStoredBlocks = kPaired ? 4 : 2;
  // Whether lanes choose gate and up before they gate, without a branch. Tiles that were measured
  // before this was written keep their machine code.
  static constexpr bool kGatesOnce = kGatesOnce_;

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
    return kGatesOnce ? quick_gated<kGating>(gate, up) : kernelcat::gated<kGating>(gate, up);
  }
};

// Runs in a consumer warpgroup. `d` is (rows, columns of D), `bias` (experts, n) or null,
// `global_scale` (experts,) for NVFP4.
template <typename Config>
__device__ __forceinline__ void consume_encoded(DecodedShared<Config>& shared,
                                                const typename Config::Tiles& tiles,
                                                typename Config::T* d,
                                                const typename Config::T* bias,
                                                const float* global_scale, int n, int num_k) {
  using T = typename Config::T;
  const int consumer = warp_index() / 4;
  PipelineState<Config::kNumStages> position;
  tiles.for_each([&](const ExpertTile& tile) {
    typename Config::Sums sums;
    float scale = 1.0f;
    if constexpr (!Config::kIsFp8) {
      scale = (Config::kNvfp4 ? global_scale[tile.expert] : 1.0f) * kGrowth<Config::kNvfp4>;
    }
    if constexpr (Config::kIsFp8 && Config::kBlocksPerSm == 1) {
      Float8Products<Config>(shared, position).add_to(sums, num_k);
    } else if constexpr (Config::kIsFp8 || Config::kScaled) {
      add_promoted<Config>(shared, position, sums, num_k);
    } else {
      add_packed<Config>(shared, position, sums, num_k);
    }
    DecodedOutput<T, Config::kGating, (Config::BLOCK_N > 128)> output = {
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

template <typename T, WeightFormat kFormat, int BLOCK_M, int BLOCK_N, int kNumStages,
          Gating kGating, bool kGather, bool kScaled,
          typename Config =
              DecodedConfig<T, kFormat, BLOCK_M, BLOCK_N, kNumStages, kGating, kGather, kScaled>>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kBlocksPerSm)
    moe_gemm_decoded(const __grid_constant__ TensorMap map_a,       // see DecodedMaps
                     const __grid_constant__ TensorMap map_w,       //
                     const __grid_constant__ TensorMap map_scales,  //
                     const T* a,            // (tokens, k), read with kGather
                     const float* a_scale,  // (k / 128, a_rows), read with kScaled
                     const float* w_scale,  // (experts, n / 128, k / 128) of float8, or of NVFP4
                                            // (experts,), or null
                     const T* bias,         // (experts, n), or null
                     const int* offsets,    // (experts + 1,)
                     const int* order,      // (rows,)
                     T* d,                  // (rows, n), or (rows, n / 2) where it is gated
                     int rows, int a_rows, int top_k, int experts, int n, int k, int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<DecodedShared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls, as in wgmma.cu.
  const auto tiles = [&]() -> typename Config::Tiles {
    return {.offsets = shared.lists(),
            .before = shared.lists() + experts + 1,
            .experts = experts,
            .num_n = ceil_div(n, Config::BLOCK_N),
            .group_m = group_m};
  };

  const DecodedMaps maps = {.a = map_a, .w = map_w, .scales = map_scales};
  if (threadIdx.x == 0) {
    maps.template prefetch<Config>();
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
    constexpr bool kAllCopy = Config::kCopyingThreads == Config::kNumProducers;
    if (kAllCopy || role == Config::kNumConsumers * 4) {
      const CopySource source = {.a = reinterpret_cast<const uint4*>(a),
                                 .order = order,
                                 .scales = {.a_scale = a_scale,
                                            .b_scale = Config::kIsFp8 ? w_scale : nullptr,
                                            .m = a_rows,
                                            .num_n = ceil_div(n, kScaleBlock)},
                                 .top_k = static_cast<uint32_t>(top_k),
                                 .row_vectors = k / static_cast<int>(kVectorBytes / sizeof(T))};
      produce_encoded<Config>(shared, tiles(), maps, source, n, num_k);
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
    consume_encoded<Config>(shared, tiles(), d, bias, w_scale, n, num_k);
  }
}

}  // namespace kernelcat
