// What a kernel of decoded weights runs: rows of A, grouped by expert, times their expert's weights
// of fewer bits (packed 4-bit codes, or float8) on Hopper, as D^T = W A^T. Thread blocks are
// persistent: producers fill a ring of stages, and consumers decode the weights to registers, from
// which wgmma takes its left operand.
//
// Tiles are found as in wgmma.cu; weights in registers are those of nvfp4_matmul/wgmma.cu, after
// Machete (vLLM).
//
// barrier  | who arrives (how many)                  | who waits | for what
// full[s]  | a producer thread, with TMA's bytes (1) | consumers | stage s holds its k-block
//          | and all threads that copy by cp.async   |           |
//          | (kCopyingThreads)                       |           |
// empty[s] | consumer warps (4, 8 or 12)               | producer  | stage s has been read
#pragma once

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

// The arrays and sizes of a grouped product.
template <typename T>
struct DecodedArrays {
  const T* a;            // (tokens, k), read with kGather
  const float* a_scale;  // (k / 128, a_rows), read with kScaled
  const float* w_scale;  // (experts, n / 128, k / 128) of float8, or of NVFP4 (experts,), or null
  const T* bias;         // (experts, n), or null
  const int* offsets;    // (experts + 1,)
  const int* order;      // (rows,)
  T* d;                  // (rows, n), or (rows, n / 2) where it is gated
  int rows, a_rows, top_k, experts, n, k, group_m;
};

// Runs in a consumer warpgroup. `d` is (rows, columns of D), `bias` (experts, n) or null,
// `global_scale` (experts,) for NVFP4.
template <typename Config>
__device__ __forceinline__ void consume_encoded(DecodedShared<Config>& shared,
                                                const typename Config::Tiles& tiles,
                                                typename Config::T* d,
                                                const typename Config::T* bias,
                                                const float* global_scale, int n, int num_k,
                                                const typename Config::Sharing& sharing) {
  using T = typename Config::T;
  using Tile = typename Config::Tiles::Item;
  const int consumer = warp_index() / 4;
  PipelineState<Config::kNumStages> position;
  tiles.for_each([&](const Tile& tile) {
    int num_k_blocks = num_k;
    if constexpr (Config::kSplits) num_k_blocks = tile.end_k - tile.first_k;
    typename Config::Sums sums;
    float scale = 1.0f;
    if constexpr (!Config::kIsFp8) {
      scale = (Config::kNvfp4 ? global_scale[tile.expert] : 1.0f) * kGrowth<Config::kNvfp4>;
    }
    if constexpr (Config::kIsFp8 && Config::kBlocksPerSm == 1) {
      Float8Products<Config>(shared, position).add_to(sums, num_k_blocks);
    } else if constexpr (Config::kIsFp8 || Config::kScaled) {
      add_promoted<Config>(shared, position, sums, num_k_blocks);
    } else {
      add_packed<Config>(shared, position, sums, num_k_blocks);
    }
    if constexpr (Config::kSplits) {
      if (!sharing.template add_up<Config>(sums, tile, shared.flag())) return;
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

// All that a thread block does. `sharing` is where thread blocks leave sums of a tile that they
// share, or empty.
template <typename Config>
__device__ __forceinline__ void multiply_experts(const DecodedMaps& maps,
                                                 const DecodedArrays<typename Config::T>& arrays,
                                                 const typename Config::Sharing& sharing) {
  using T = typename Config::T;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<DecodedShared<Config>*>(dynamic_shared + padding);
  // Lambdas that each role calls, as in wgmma.cu.
  const auto whole = [&]() -> ExpertTiles<Config::BLOCK_M, Config::BLOCK_N> {
    return {.offsets = shared.lists(),
            .before = shared.lists() + arrays.experts + 1,
            .experts = arrays.experts,
            .num_n = ceil_div(arrays.n, Config::BLOCK_N),
            .group_m = arrays.group_m};
  };
  const auto tiles = [&]() -> typename Config::Tiles {
    if constexpr (Config::kSplits) {
      return {whole(), ceil_div(arrays.k, Config::BLOCK_K)};
    } else {
      return whole();
    }
  };

  if (threadIdx.x == 0) {
    maps.template prefetch<Config>();
    for (Barrier& barrier : shared.full) barrier.init(1 + Config::kCopyingThreads);
    for (Barrier& barrier : shared.empty) barrier.init(Config::kNumConsumers * 4);
    fence_barrier_init();
  }
  grid_dependency_wait();
  tiles().load(arrays.offsets);
  __syncthreads();

  const int num_k = ceil_div(arrays.k, Config::BLOCK_K);
  const int role = warp_index();  // outside the branches: all lanes must call warp_index()
  if (role >= Config::kNumConsumers * 4) {
    if constexpr (Config::kBlocksPerSm == 1) decrease_registers<Config::kProducerRegisters>();
    constexpr bool kAllCopy = Config::kCopyingThreads == Config::kNumProducers;
    if (kAllCopy || role == Config::kNumConsumers * 4) {
      const CopySource source = {
          .a = reinterpret_cast<const uint4*>(arrays.a),
          .order = arrays.order,
          .scales = {.a_scale = arrays.a_scale,
                     .b_scale = Config::kIsFp8 ? arrays.w_scale : nullptr,
                     .m = arrays.a_rows,
                     .num_n = ceil_div(arrays.n, kScaleBlock)},
          .top_k = static_cast<uint32_t>(arrays.top_k),
          .row_vectors = arrays.k / static_cast<int>(kVectorBytes / sizeof(T))};
      produce_encoded<Config>(shared, tiles(), maps, source, arrays.n, num_k);
    }
    launch_dependents();
  } else {
    if constexpr (Config::kBlocksPerSm == 1) increase_registers<Config::kConsumerRegisters>();
    const ExpertOutput<Config> all_rows = {
        .rows = arrays.d,
        .bias = nullptr,
        .n = arrays.n,
        .pitch = kIsGated<Config::kGating> ? arrays.n / 2 : arrays.n,
        .is_aligned = arrays.n % (kIsGated<Config::kGating> ? 16 : 8) == 0 &&
                      kernelcat::is_aligned(arrays.d, 16)};
    all_rows.clear(tiles().num_rows(), arrays.rows, threadIdx.x,
                   Config::kNumConsumers * kWarpgroupThreads);
    consume_encoded<Config>(shared, tiles(), arrays.d, arrays.bias, arrays.w_scale, arrays.n, num_k,
                            sharing);
  }
}

}  // namespace kernelcat
