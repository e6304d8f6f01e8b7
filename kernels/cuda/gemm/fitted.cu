// The product of wgmma.cu, where the last tiles load only rows that exist; see FittedOperand.
#include "wgmma_product.cuh"

namespace kernelcat {

// As gemm_wgmma. The boxes of `edge` maps are as high as what is left for the last part of the last
// tile, in whole atoms of 8 rows.
template <
    typename T, int BLOCK_M, int BLOCK_N, int kNumStages, bool kPingpong, bool kSwap, int kClusterM,
    int kClusterN, bool kSplit, bool kTmaStore, Activation kActivation, bool kResidual,
    int kLastDepth,
    typename Config = WgmmaTile<T, BLOCK_M, BLOCK_N, kNumStages, kPingpong, kSwap, kClusterM,
                                kClusterN, kSplit, kTmaStore, kActivation, kResidual, kLastDepth>>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kBlocksPerSm)
    gemm_fitted(const __grid_constant__ TensorMap map_a,  // (m, k), boxes BLOCK_M / kClusterN high
                const __grid_constant__ TensorMap edge_a,
                const __grid_constant__ TensorMap map_b,  // (n, k), boxes BLOCK_N / kClusterM high
                const __grid_constant__ TensorMap edge_b,
                const __grid_constant__ TensorMap map_d,  // d, boxes kChunkRows x kChunkCols
                const T* bias,                            // (n,) or null
                const T* residual,                        // (m, columns of d) or null
                T* d,                                     // (m, n), or (m, n / 2) for kSwiglu
                float* partials,     // (split tiles, num_splits, BLOCK_M * BLOCK_N)
                uint32_t* counters,  // (split tiles, kConsumersPerTile), zeros
                int m, int n, int k, int num_whole_tiles, int num_splits, int group_m) {
  multiply_by_wgmma<Config>(FittedOperand{map_a, edge_a, kSwap ? n : m},
                            FittedOperand{map_b, edge_b, kSwap ? m : n}, map_d,
                            {.d = d, .bias = bias, .m = m, .n = n, .residual = residual}, partials,
                            counters, k, num_whole_tiles, num_splits, group_m);
}

}  // namespace kernelcat
