// The online softmax of two rows, whose scores come one KV tile at a time.
#pragma once

#include <kernelcat/softmax.cuh>

namespace kernelcat {

// Lane l has rows l / 4 and l / 4 + 8 of its warp's 16, in the layout of the accumulators of
// mma.sync and wgmma: for every eight tokens two scores of the upper row, then two of the lower.
struct RunningSoftmax {
  float row_max[2] = {-kInfinity, -kInfinity};  // of scores times their factor, in base 2
  float row_sum[2] = {};  // of the lane's own columns, until reduce_row_sums()

  // Replaces scores by exponentials relative to the largest score so far. Accumulators of earlier
  // tiles must then be multiplied by `rescale`. `factor` must not be negative.
  template <int kTiles>
  __device__ __forceinline__ void add(float (&scores)[kTiles][4], float factor,
                                      float (&rescale)[2]) {
    float new_max[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      new_max[row] = max_of_lane(scores, row);
      new_max[row] = fmaxf(new_max[row], __shfl_xor_sync(0xffffffff, new_max[row], 1));
      new_max[row] = fmaxf(new_max[row], __shfl_xor_sync(0xffffffff, new_max[row], 2));
      new_max[row] = fmaxf(row_max[row], new_max[row] * factor);
      rescale[row] = rescale_factor(row_max[row], new_max[row]);
      row_max[row] = new_max[row];
      row_sum[row] *= rescale[row];
      if (new_max[row] == -kInfinity) new_max[row] = 0.0f;  // no visible key: exp2(-inf - 0)
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = fast_exp2(fmaf(scores[i][j], factor, -new_max[j / 2]));
        row_sum[j / 2] += scores[i][j];
      }
    }
  }

  // Adds up the row sums of the four lanes that share the rows, in all of them.
  __device__ __forceinline__ void reduce_row_sums() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      row_sum[row] += __shfl_xor_sync(0xffffffff, row_sum[row], 1);
      row_sum[row] += __shfl_xor_sync(0xffffffff, row_sum[row], 2);
    }
  }

 private:
  // Two chains of comparisons, because each comparison waits for the one before it in its chain.
  template <int kTiles>
  static __device__ __forceinline__ float max_of_lane(const float (&scores)[kTiles][4], int row) {
    float chains[2] = {scores[0][2 * row], scores[0][2 * row + 1]};
#pragma unroll
    for (int i = 1; i < kTiles; ++i) {
      chains[0] = fmaxf(chains[0], scores[i][2 * row]);
      chains[1] = fmaxf(chains[1], scores[i][2 * row + 1]);
    }
    return fmaxf(chains[0], chains[1]);
  }
};

}  // namespace kernelcat
