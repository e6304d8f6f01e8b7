// D = A @ B^T with block scales on Hopper; see wgmma_product.cuh.
#include "wgmma_product.cuh"

namespace kernelcat {

// With kSwap the operands change places: map_a is B's and map_b A's.
template <
    int BLOCK_M, int BLOCK_N, int kNumStages, bool kSwap, int kClusterM, int kClusterN,
    Overlap kOverlap,
    typename Config = Fp8Tile<BLOCK_M, BLOCK_N, kNumStages, kSwap, kClusterM, kClusterN, kOverlap>>
__global__ void __launch_bounds__(Config::kNumThreads, 1) fp8_gemm_wgmma(
    const __grid_constant__ TensorMap map_a,  // (m, k), boxes BLOCK_M / kClusterN high
    const __grid_constant__ TensorMap map_b,  // (n, k), boxes BLOCK_N / kClusterM high
    const float* a_scale,                     // (k / 128, m)
    const float* b_scale,                     // (n / 128, k / 128)
    bfloat16* d,                              // (m, n)
    float* partials,                          // (split tiles, num_splits, BLOCK_M * BLOCK_N)
    uint32_t* counters,                       // (split tiles, kNumConsumers), zeros
    int m, int n, int k, int num_whole_tiles, int num_splits, int group_m) {
  multiply_by_wgmma<Config>(map_a, map_b, a_scale, b_scale, d, partials, counters, m, n, k,
                            num_whole_tiles, num_splits, group_m);
}

}  // namespace kernelcat
