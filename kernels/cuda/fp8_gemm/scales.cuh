// The scales of a stage: how they arrive in shared memory, and how a wgmma's sums are promoted.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/mbarrier.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// What a tile with kRows rows of A needs of one k block. Its rows of B, which begin at a multiple
// of their number (32 to 256, a multiple of 32), lie in two blocks of 128 at most.
template <int kRows>
struct StageScales {
  alignas(8) float a[kRows];
  float b[2];
};

// Where they come from: a_scale is (num_k, m), b_scale (num_n, num_k).
struct ScaleSource {
  const float *a_scale, *b_scale;
  int m, num_n, num_k;
};

// Zeros where `valid` is false, and nothing is read.
__device__ __forceinline__ void async_copy_4(float* shared, const float* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// One arrival, made when this thread's earlier async copies have landed.
__device__ __forceinline__ void arrive_when_copied(Barrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

// All lanes of a warp start copies of 4 bytes, which take any m; each lane arrives at `full` when
// its own have landed. Rows outside A get zeros.
template <int kRows>
__device__ __forceinline__ void load_scales(StageScales<kRows>& scales, const ScaleSource& source,
                                            int row, int col, int k_block, Barrier& full) {
  const int lane = lane_index();
  const float* a_scale = source.a_scale + static_cast<int64_t>(k_block) * source.m;
#pragma unroll
  for (int i = lane; i < kRows; i += kWarpThreads) {
    const bool valid = row + i < source.m;
    async_copy_4(&scales.a[i], valid ? a_scale + row + i : a_scale, valid);
  }
  if (lane < 2) {
    const int n_block = min(col / kScaleBlock + lane, source.num_n - 1);
    const int64_t place = static_cast<int64_t>(n_block) * source.num_k + k_block;
    async_copy_4(&scales.b[lane], source.b_scale + place, true);
  }
  arrive_when_copied(full);
}

// One thread's share of a stage's scales, for 64 rows x kCols of a tile whose rows are A's.
template <int kCols, bool kSwap>
struct Promotion {
  float a[2], b[2];

  // `row` is the upper one of the thread's two in the tile, `col` the tile's first column in D.
  template <int kRows>
  __device__ __forceinline__ void load(const StageScales<kRows>& scales, int row, int col) {
    a[0] = scales.a[row];
    a[1] = scales.a[row + 8];
    b[0] = scales.b[0];
    b[1] = scales.b[1];
  }

  __device__ __forceinline__ void add(float (&sums)[kCols / 2], const float (&products)[kCols / 2],
                                      int col) const {
    // Columns that never have different scales.
    constexpr int kSpan = kCols % kScaleBlock == 0 ? kScaleBlock
                          : kCols % 64 == 0        ? 64
                          : kCols % 32 == 0        ? 32
                                                   : 16;
#pragma unroll
    for (int first = 0; first < kCols; first += kSpan) {
      const bool is_second = col % kScaleBlock + first >= kScaleBlock;
      const float scale = kScaleBlock % kCols != 0 && is_second ? b[1] : b[0];
      const float scales[2] = {a[0] * scale, a[1] * scale};
#pragma unroll
      for (int i = first / 2; i < (first + kSpan) / 2; ++i) {
        sums[i] += scales[i / 2 % 2] * products[i];
      }
    }
  }
};

// The same for a tile whose rows are B's: all 64 share b's scale, and a's run along the columns.
template <int kCols>
struct Promotion<kCols, true> {
  float scales[kCols / 4];

  template <int kRows>
  __device__ __forceinline__ void load(const StageScales<kRows>& stage, int row, int col) {
    const float b = stage.b[(col % kScaleBlock + row) / kScaleBlock];
#pragma unroll
    for (int i = 0; i < kCols / 8; ++i) {
      const int mine = 8 * i + lane_index() % 4 * 2;
      const float2 a = *reinterpret_cast<const float2*>(&stage.a[mine]);
      scales[2 * i] = a.x * b;
      scales[2 * i + 1] = a.y * b;
    }
  }

  __device__ __forceinline__ void add(float (&sums)[kCols / 2], const float (&products)[kCols / 2],
                                      int col) const {
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) sums[i] += scales[i / 4 * 2 + i % 2] * products[i];
  }
};

}  // namespace kernelcat
