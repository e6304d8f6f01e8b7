// The softmax of two rows whose scores come a tile at a time.
#pragma once

#include <kernelcat/softmax.cuh>

namespace kernelcat {

// Lane l has, of rows l / 4 and l / 4 + 8 of its warp, what mma.sync and wgmma leave it: for every
// eight tokens two scores of the upper row, then two of the lower.
struct RunningSoftmax {
  float most[2] = {-kInfinity, -kInfinity};  // of scores times their factor, in base 2
  float total[2] = {};                       // over the lane's own columns

  // Scores become exponentials relative to the largest so far; sums of earlier ones are to be
  // multiplied by `kept`. `factor` must not be negative.
  template <int kTiles>
  __device__ __forceinline__ void add(float (&scores)[kTiles][4], float factor, float (&kept)[2]) {
    float new_most[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      new_most[row] = largest(scores, row);
      new_most[row] = fmaxf(new_most[row], __shfl_xor_sync(0xffffffff, new_most[row], 1));
      new_most[row] = fmaxf(new_most[row], __shfl_xor_sync(0xffffffff, new_most[row], 2));
      new_most[row] = fmaxf(most[row], new_most[row] * factor);
      kept[row] = rescale_factor(most[row], new_most[row]);
      most[row] = new_most[row];
      total[row] *= kept[row];
      if (new_most[row] == -kInfinity) new_most[row] = 0.0f;  // nothing seen: exp2(-inf - 0)
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = fast_exp2(fmaf(scores[i][j], factor, -new_most[j / 2]));
        total[j / 2] += scores[i][j];
      }
    }
  }

  // The rows' totals, in all lanes.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      total[row] += __shfl_xor_sync(0xffffffff, total[row], 1);
      total[row] += __shfl_xor_sync(0xffffffff, total[row], 2);
    }
  }

 private:
  // Two chains, for each step takes a while.
  template <int kTiles>
  static __device__ __forceinline__ float largest(const float (&scores)[kTiles][4], int row) {
    float most[2] = {scores[0][2 * row], scores[0][2 * row + 1]};
#pragma unroll
    for (int i = 1; i < kTiles; ++i) {
      most[0] = fmaxf(most[0], scores[i][2 * row]);
      most[1] = fmaxf(most[1], scores[i][2 * row + 1]);
    }
    return fmaxf(most[0], most[1]);
  }
};

}  // namespace kernelcat
