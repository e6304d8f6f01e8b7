// D = activation(A @ B^T + bias) + residual by mma.sync from a ring of stages that one warp fills
// by TMA. Measured against `tiled`, whose multiplying warps load the operands, the kernel shows
// what TMA alone brings.
//
// barrier  | who arrives (how many)               | who waits      | for what
// full[s]  | producer, with the stage's bytes (1) | consumer warps | stage s holds its k-block
// empty[s] | consumer warps (BLOCK_N / 16)        | producer       | stage s has been read
#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/stage_release.cuh>
#include <kernelcat/tile_order.cuh>

#include "warp_tile.cuh"

namespace kernelcat {

constexpr int BLOCK_K = 64;  // 128 bytes: one row of the swizzle
constexpr int kRowBytes = BLOCK_K * 2;

template <int BLOCK_M, int BLOCK_N, int kNumStages>
struct TmaShared {
  alignas(1024) uint8_t a[kNumStages][BLOCK_M * kRowBytes];
  alignas(1024) uint8_t b[kNumStages][BLOCK_N * kRowBytes];
  Barrier full[kNumStages];
  Barrier empty[kNumStages];
};

// A thread block computes one tile: BLOCK_N / 16 warps in two rows multiply, and one more loads.
template <typename T, int BLOCK_M, int BLOCK_N, int kNumStages, Activation kActivation,
          bool kResidual>
__global__ void __launch_bounds__(BLOCK_N * 2 + kWarpThreads)
    gemm_tma(const __grid_constant__ TensorMap map_a,  // (m, k), boxes of BLOCK_M x BLOCK_K
             const __grid_constant__ TensorMap map_b,  // (n, k), boxes of BLOCK_N x BLOCK_K
             const T* bias,                            // (n,) or null
             const T* residual,                        // (m, columns of d) or null
             T* d,                                     // (m, n), or (m, n / 2) for kSwiglu
             int m, int n, int k, int group_m) {
  constexpr int kNumConsumerWarps = BLOCK_N / 16;
  constexpr int kWarpRows = BLOCK_M / 2, kWarpCols = 32;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared =
      *reinterpret_cast<TmaShared<BLOCK_M, BLOCK_N, kNumStages>*>(dynamic_shared + padding);
  const Tile tile = grouped_tile(blockIdx.x, ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), group_m);
  const int num_k = ceil_div(k, BLOCK_K);

  if (threadIdx.x == 0) {
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) barrier.init(kNumConsumerWarps);
    fence_barrier_init();
  }
  __syncthreads();

  PipelineState<kNumStages> position;
  if (warp_index() == kNumConsumerWarps) {
    if (!elect_one()) return;
    for (int k_block = 0; k_block < num_k; ++k_block, position.advance()) {
      const int stage = position.stage;
      shared.empty[stage].wait(position.phase ^ 1);
      Barrier& full = shared.full[stage];
      full.arrive_expect((BLOCK_M + BLOCK_N) * kRowBytes);
      tensor_load(shared.a[stage], map_a, k_block * BLOCK_K, tile.m * BLOCK_M, full,
                  kDefaultPolicy);
      tensor_load(shared.b[stage], map_b, k_block * BLOCK_K, tile.n * BLOCK_N, full,
                  kDefaultPolicy);
    }
    return;
  }

  const int warp_row = warp_index() % 2 * kWarpRows, warp_col = warp_index() / 2 * kWarpCols;
  WarpTile<T, kWarpRows, kWarpCols> sums;
  for (int k_block = 0; k_block < num_k; ++k_block, position.advance()) {
    const int stage = position.stage;
    shared.full[stage].wait(position.phase);
    const uint32_t a = shared_address(shared.a[stage]), b = shared_address(shared.b[stage]);
#pragma unroll
    for (int i = 0; i < BLOCK_K / 8; i += 2) {
      const auto offset_of = [&](int row, int unit) {
        return swizzled<kRowBytes>(row * kRowBytes + (i + unit) * 16);
      };
      sums.multiply([&](int row, int unit) { return a + offset_of(warp_row + row, unit); },
                    [&](int row, int unit) { return b + offset_of(warp_col + row, unit); });
    }
    release_stage_after_loads(shared.empty[stage]);
  }
  const GemmOutput<T, kActivation, kResidual> output = {
      .d = d, .bias = bias, .m = m, .n = n, .residual = residual};
  sums.store(output, tile.m * BLOCK_M + warp_row, tile.n * BLOCK_N + warp_col);
}

}  // namespace kernelcat
