// D = activation(A @ B^T + bias) + residual on Hopper; see wgmma_product.cuh.
#include "wgmma_product.cuh"

namespace kernelcat {

// m and n are those of Z. With kSwap the operands change places: map_a is B's and map_b A's.
template <
    typename T, int BLOCK_M, int BLOCK_N, int kNumStages, bool kPingpong, bool kSwap, int kClusterM,
    int kClusterN, bool kSplit, bool kTmaStore, Activation kActivation, bool kResidual,
    int kLastDepth,
    typename Config = WgmmaTile<T, BLOCK_M, BLOCK_N, kNumStages, kPingpong, kSwap, kClusterM,
                                kClusterN, kSplit, kTmaStore, kActivation, kResidual, kLastDepth>>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kBlocksPerSm)
    gemm_wgmma(const __grid_constant__ TensorMap map_a,  // (m, k), boxes BLOCK_M / kClusterN high
               const __grid_constant__ TensorMap map_b,  // (n, k), boxes BLOCK_N / kClusterM high
               const __grid_constant__ TensorMap map_d,  // d, boxes kChunkRows x kChunkCols
               const T* bias,                            // (n,) or null
               const T* residual,                        // (m, columns of d) or null
               T* d,                                     // (m, n), or (m, n / 2) for kSwiglu
               float* partials,     // (split tiles, num_splits, BLOCK_M * BLOCK_N)
               uint32_t* counters,  // (split tiles, kConsumersPerTile), zeros
               int m, int n, int k, int num_whole_tiles, int num_splits, int group_m) {
  multiply_by_wgmma<Config>(map_a, map_b, map_d,
                            {.d = d, .bias = bias, .m = m, .n = n, .residual = residual}, partials,
                            counters, k, num_whole_tiles, num_splits, group_m);
}

}  // namespace kernelcat
