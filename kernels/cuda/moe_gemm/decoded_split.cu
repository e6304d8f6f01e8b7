// Grouped products with decoded weights, whose last wave of tiles is split over k: see
// decoded_kernel.cuh and split_tiles.cuh.
#include "decoded_kernel.cuh"
#include "split_tiles.cuh"

namespace kernelcat {

// A DecodedConfig whose thread blocks share tiles.
template <typename Whole>
struct SplitConfig : Whole {
  static_assert(Whole::kNumConsumers == 1 && !Whole::kIsFp8 && !Whole::kScaled);
  static constexpr bool kSplits = true;
  using Tiles = SplitTiles<Whole::BLOCK_M, Whole::BLOCK_N>;
  using Sharing = TileSharing;
};

template <typename T, WeightFormat kFormat, int BLOCK_M, int BLOCK_N, int kNumStages,
          Gating kGating, bool kGather,
          typename Config = SplitConfig<
              DecodedConfig<T, kFormat, BLOCK_M, BLOCK_N, kNumStages, kGating, kGather, false>>>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kBlocksPerSm)
    moe_gemm_decoded_split(const __grid_constant__ TensorMap map_a,       // see DecodedMaps
                           const __grid_constant__ TensorMap map_w,       //
                           const __grid_constant__ TensorMap map_scales,  //
                           const T* a, const float* a_scale, const float* w_scale, const T* bias,
                           const int* offsets, const int* order, T* d, int rows, int a_rows,
                           int top_k, int experts, int n, int k, int group_m,
                           float* partials,    // (thread blocks, BLOCK_M * BLOCK_N)
                           uint32_t* counters  // (thread blocks,), zero before and after
    ) {                                        // the others: see DecodedArrays
  const DecodedMaps maps = {.a = map_a, .w = map_w, .scales = map_scales};
  const DecodedArrays<T> arrays = {a,    a_scale, w_scale, bias,    offsets, order, d,
                                   rows, a_rows,  top_k,   experts, n,       k,     group_m};
  multiply_experts<Config>(maps, arrays, {partials, counters});
}

}  // namespace kernelcat
