// The scales of a stage: their copies to shared memory, and the promotion of products by them.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/mbarrier.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// The scales of one k-block for a tile with kRows rows of A. The tile's rows of B begin at a
// multiple of their number, which is a multiple of 32 up to 256, so they lie in at most two blocks
// of 128.
template <int kRows>
struct StageScales {
  alignas(8) float a[kRows];
  float b[2];
};

// The scales in global memory.
struct ScaleSource {
  const float* a_scale;  // (num_k, m)
  const float* b_scale;  // (num_n, num_k)
  int m, num_n, num_k;
};

// Copies 4 bytes asynchronously; where `valid` is false, writes zeros and reads nothing.
__device__ __forceinline__ void async_copy_4(float* shared, const float* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// One arrival, which happens when this thread's earlier asynchronous copies have landed.
__device__ __forceinline__ void arrive_when_copied(Barrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}

// All lanes of a warp start copies, of 4 bytes because m may be any number; each lane arrives at
// `full` when its copies have landed. Rows outside A get zeros.
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
    const int64_t index = static_cast<int64_t>(n_block) * source.num_k + k_block;
    async_copy_4(&scales.b[lane], source.b_scale + index, true);
  }
  arrive_when_copied(full);
}

// The scales that a thread needs to promote the products of 64 rows x kCols of a stage, where the
// rows of the tile are A's.
template <int kCols, bool kSwap>
struct ScalePromotion {
  float a[2], b[2];

  // `row` is the upper one of the thread's two rows of the tile, `col` the tile's first column in
  // D.
  template <int kRows>
  __device__ __forceinline__ void load(const StageScales<kRows>& scales, int row, int col) {
    a[0] = scales.a[row];
    a[1] = scales.a[row + 8];
    b[0] = scales.b[0];
    b[1] = scales.b[1];
  }

  // Adds `products` times their scales to `sums`.
  __device__ __forceinline__ void add(float (&sums)[kCols / 2], const float (&products)[kCols / 2],
                                      int col) const {
    // Groups of kSpan columns, all of which have the same scale of B.
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

// The scales where the rows of the tile are B's: all 64 rows have one scale of B, and every column
// has a scale of A.
template <int kCols>
struct ScalePromotion<kCols, true> {
  float scales[kCols / 4];

  template <int kRows>
  __device__ __forceinline__ void load(const StageScales<kRows>& stage, int row, int col) {
    const float b = stage.b[(col % kScaleBlock + row) / kScaleBlock];
#pragma unroll
    for (int i = 0; i < kCols / 8; ++i) {
      const int pair = 8 * i + lane_index() % 4 * 2;  // the thread's columns
      const float2 a = *reinterpret_cast<const float2*>(&stage.a[pair]);
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
