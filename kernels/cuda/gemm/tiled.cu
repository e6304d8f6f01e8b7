// D = activation(A @ B^T + bias) + residual by mma.sync from a ring of stages, which the
// multiplying warps fill by cp.async; any shape and alignment.
#include <kernelcat/async_copy.cuh>
#include <kernelcat/mbarrier.cuh>
#include <kernelcat/tile_order.cuh>

#include "warp_tile.cuh"

namespace kernelcat {

constexpr int BLOCK_K = 32;
constexpr int kUnit = 8;  // elements in 16 bytes
constexpr int kUnitsPerRow = BLOCK_K / kUnit;
constexpr int kRowBytes = BLOCK_K * 2 + 16;  // an odd number of 16 bytes: no bank conflicts

// Eight elements, of which the first `num_valid` are read and the others are zero. The address may
// be a multiple of 2 only: the aligned words inside the 16 bytes are then loaded whole, and
// shifted.
template <typename T>
__device__ __forceinline__ uint4 load_unit(const T* address, int num_valid) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(address);
  uint32_t words[4];
  if (num_valid < kUnit) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = 2 * i < num_valid ? halves[2 * i] : 0;
      const uint32_t high = 2 * i + 1 < num_valid ? halves[2 * i + 1] : 0;
      words[i] = low | high << 16;
    }
  } else if (is_aligned(address, 4)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const uint32_t*>(address)[i];
  } else {
    const uint32_t* inner = reinterpret_cast<const uint32_t*>(halves + 1);
    const uint32_t straddling[5] = {static_cast<uint32_t>(halves[0]) << 16, inner[0], inner[1],
                                    inner[2], halves[7]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = __funnelshift_r(straddling[i], straddling[i + 1], 16);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// Loads kRows rows of one operand, from row `first_row` of `num_rows` on, BLOCK_K columns at a
// time. With kAligned (every row begins at a multiple of 16 bytes) `fetch` copies asynchronously to
// shared memory; otherwise `fetch` loads to registers, and `deliver` stores to shared memory.
template <typename T, int kRows, int kThreads, bool kAligned>
struct OperandLoader {
  static constexpr int kUnits = kRows * kUnitsPerRow / kThreads;  // of a thread
  static_assert(kRows * kUnitsPerRow % kThreads == 0);

  const T* operand;  // (num_rows, k)
  int first_row, num_rows, k;
  uint4 units[kAligned ? 1 : kUnits];

  // The rows of a warp are all even or all odd. With an odd k, even and odd rows differ in
  // alignment, and a warp that had both would run through both branches of load_unit.
  static __device__ __forceinline__ int row_of(int i) {
    const int row = (threadIdx.x + i * kThreads) / kUnitsPerRow;
    return row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
  }

  __device__ __forceinline__ void fetch(uint32_t stage, int first_col) {
    const int col = first_col + threadIdx.x % kUnitsPerRow * kUnit;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int row = first_row + row_of(i);
      const int num_valid = row < num_rows ? max(min(k - col, kUnit), 0) : 0;
      const T* address = num_valid > 0 ? operand + static_cast<int64_t>(row) * k + col : operand;
      if constexpr (kAligned) {
        async_copy_16(unit_address(stage, i), address, num_valid > 0);
      } else {
        units[i] = load_unit(address, num_valid);
      }
    }
  }

  __device__ __forceinline__ void deliver(uint32_t stage) {
    if constexpr (!kAligned) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        *static_cast<uint4*>(__cvta_shared_to_generic(unit_address(stage, i))) = units[i];
      }
    }
  }

  static __device__ __forceinline__ uint32_t unit_address(uint32_t stage, int i) {
    return stage + row_of(i) * kRowBytes + threadIdx.x % kUnitsPerRow * 16;
  }
};

template <int BLOCK_M, int BLOCK_N, int kNumStages, bool kAligned, typename T, typename Output>
__device__ __forceinline__ void compute_tile(uint32_t shared, const T* a, const T* b,
                                             const Output& output, int k, Tile tile) {
  constexpr int kWarpRows = BLOCK_M / 2, kWarpCols = 32;
  constexpr int kThreads = 2 * (BLOCK_N / kWarpCols) * kWarpThreads;
  constexpr uint32_t kStageBytesA = BLOCK_M * kRowBytes;
  constexpr uint32_t kStageBytes = kStageBytesA + BLOCK_N * kRowBytes;

  OperandLoader<T, BLOCK_M, kThreads, kAligned> loader_a = {
      .operand = a, .first_row = tile.m * BLOCK_M, .num_rows = output.m, .k = k};
  OperandLoader<T, BLOCK_N, kThreads, kAligned> loader_b = {
      .operand = b, .first_row = tile.n * BLOCK_N, .num_rows = output.n, .k = k};
  const auto stage_of = [&](int k_block) { return shared + k_block % kNumStages * kStageBytes; };
  const auto fetch = [&](int k_block) {
    loader_a.fetch(stage_of(k_block), k_block * BLOCK_K);
    loader_b.fetch(stage_of(k_block) + kStageBytesA, k_block * BLOCK_K);
  };
  const auto deliver = [&](int k_block) {
    loader_a.deliver(stage_of(k_block));
    loader_b.deliver(stage_of(k_block) + kStageBytesA);
    commit_async_copies();
  };

  const int num_k = ceil_div(k, BLOCK_K);
  const int warp_row = warp_index() % 2 * kWarpRows, warp_col = warp_index() / 2 * kWarpCols;
  WarpTile<T, kWarpRows, kWarpCols> sums;
  for (int k_block = 0; k_block < kNumStages - 1; ++k_block) {
    fetch(k_block);
    deliver(k_block);
  }
  for (int k_block = 0; k_block < num_k; ++k_block) {
    wait_async_copies<kNumStages - 2>();
    __syncthreads();  // all threads see k_block, and none reads the stage that is filled next
    fetch(k_block + kNumStages - 1);
    const uint32_t rows_a = stage_of(k_block) + warp_row * kRowBytes;
    const uint32_t rows_b = stage_of(k_block) + kStageBytesA + warp_col * kRowBytes;
#pragma unroll
    for (int i = 0; i < kUnitsPerRow; i += 2) {
      sums.multiply([&](int row, int unit) { return rows_a + row * kRowBytes + (i + unit) * 16; },
                    [&](int row, int unit) { return rows_b + row * kRowBytes + (i + unit) * 16; });
    }
    deliver(k_block + kNumStages - 1);
  }
  wait_async_copies<0>();
  sums.store(output, tile.m * BLOCK_M + warp_row, tile.n * BLOCK_N + warp_col);
}

// A thread block computes one tile, with BLOCK_N / 16 warps in two rows.
template <typename T, int BLOCK_M, int BLOCK_N, int kNumStages, Activation kActivation,
          bool kResidual>
__global__ void __launch_bounds__(BLOCK_N * 2)
    gemm_tiled(const T* a,         // (m, k)
               const T* b,         // (n, k)
               const T* bias,      // (n,) or null
               const T* residual,  // (m, columns of d) or null
               T* d,               // (m, n), or (m, n / 2) for kSwiglu
               int m, int n, int k, int group_m) {
  extern __shared__ __align__(16) uint8_t stages[];
  const GemmOutput<T, kActivation, kResidual> output = {
      .d = d, .bias = bias, .m = m, .n = n, .residual = residual};
  const Tile tile = grouped_tile(blockIdx.x, ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), group_m);
  const uint32_t shared = shared_address(stages);
  if (k % kUnit == 0 && is_aligned(a, 16) && is_aligned(b, 16)) {
    compute_tile<BLOCK_M, BLOCK_N, kNumStages, true>(shared, a, b, output, k, tile);
  } else {
    compute_tile<BLOCK_M, BLOCK_N, kNumStages, false>(shared, a, b, output, k, tile);
  }
}

}  // namespace kernelcat
