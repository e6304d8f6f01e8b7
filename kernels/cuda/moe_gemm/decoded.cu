// Grouped products with decoded weights, of whole tiles: see decoded_kernel.cuh.
#include "decoded_kernel.cuh"

namespace kernelcat {

template <typename T, WeightFormat kFormat, int BLOCK_M, int BLOCK_N, int kNumStages,
          Gating kGating, bool kGather, bool kScaled,
          typename Config =
              DecodedConfig<T, kFormat, BLOCK_M, BLOCK_N, kNumStages, kGating, kGather, kScaled>>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kBlocksPerSm)
    moe_gemm_decoded(const __grid_constant__ TensorMap map_a,       // see DecodedMaps
                     const __grid_constant__ TensorMap map_w,       //
                     const __grid_constant__ TensorMap map_scales,  //
                     const T* a, const float* a_scale, const float* w_scale, const T* bias,
                     const int* offsets, const int* order, T* d, int rows, int a_rows, int top_k,
                     int experts, int n, int k, int group_m) {  // see DecodedArrays
  const DecodedMaps maps = {.a = map_a, .w = map_w, .scales = map_scales};
  const DecodedArrays<T> arrays = {a,    a_scale, w_scale, bias,    offsets, order, d,
                                   rows, a_rows,  top_k,   experts, n,       k,     group_m};
  multiply_experts<Config>(maps, arrays, {});
}

}  // namespace kernelcat
