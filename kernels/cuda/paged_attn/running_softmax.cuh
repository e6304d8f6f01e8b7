// The softmax of two rows whose scores come a tile at a time.
#pragma once

#include "softmax.cuh"

namespace kernelcat {

// Lane l has, of rows l / 4 and l / 4 + 8 of its warp, what mma.sync and wgmma leave it: of every
// four scores the first two belong to the upper row.
struct RunningSoftmax {
  float most[2] = {-kInfinity, -kInfinity};  // of scores times their factor, in base 2
  float total[2] = {};                       // over the lane's own columns

  // Scores become exponentials relative to the largest so far; sums of earlier ones are to be
  // multiplied by `kept`. `factor` must not be negative.
  template <int kCount>
  __device__ __forceinline__ void add(float (&scores)[kCount], float factor, float (&kept)[2]) {
    float new_most[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) new_most[row] = largest(scores, 2 * row);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      new_most[row] = fmaxf(new_most[row], __shfl_xor_sync(0xffffffff, new_most[row], 1));
      new_most[row] = fmaxf(new_most[row], __shfl_xor_sync(0xffffffff, new_most[row], 2));
      new_most[row] = fmaxf(most[row], new_most[row] * factor);
      kept[row] = rescale(most[row], new_most[row]);
      most[row] = new_most[row];
      total[row] *= kept[row];
      if (new_most[row] == -kInfinity) new_most[row] = 0.0f;  // nothing seen: exp2(-inf - 0)
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = fast_exp2(fmaf(scores[i], factor, -new_most[i / 2 % 2]));
      total[i / 2 % 2] += scores[i];
    }
  }

  // Of every four scores those at `first` and behind it. Four chains, for each step takes a while.
  template <int kCount>
  static __device__ __forceinline__ float largest(const float (&scores)[kCount], int first) {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = scores[i / 2 * 4 + first + i % 2];
#pragma unroll
    for (int i = 4; i < kCount / 2; ++i) {
      most[i % 4] = fmaxf(most[i % 4], scores[i / 2 * 4 + first + i % 2]);
    }
    return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
  }

  // The rows' totals, in all lanes.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      total[row] += __shfl_xor_sync(0xffffffff, total[row], 1);
      total[row] += __shfl_xor_sync(0xffffffff, total[row], 2);
    }
  }
};

}  // namespace kernelcat
