// The softmax of flashmla/wgmma and pair, which leaves 64 x 512 sums alone while it can.
#pragma once

#include <kernelcat/running_softmax.cuh>

namespace kernelcat {

// Exponentials are relative to a score that is no more than kSlack (in base 2) below the largest so
// far: sums are multiplied again only where a score exceeds it by more (after FlashAttention-4).
// Weights are then up to 256, which float16 holds, with as many bits as below 1.
struct LatentSoftmax : RunningSoftmax {
  static constexpr float kSlack = 8.0f;

  // Scores of two rows, as wgmma leaves them, become exponentials; sums of earlier ones are to be
  // multiplied by `kept`. `factor` must not be negative.
  template <int kScores>
  __device__ __forceinline__ void add(float (&scores)[kScores], float factor, float (&kept)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float largest = fmaxf(scores[2 * row], scores[2 * row + 1]);
#pragma unroll
      for (int i = 4; i < kScores; i += 4) {
        largest = fmaxf(largest, fmaxf(scores[i + 2 * row], scores[i + 2 * row + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
      largest = factor * fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
      const float before = row_max[row];
      if (largest > before + kSlack) row_max[row] = largest;
      kept[row] = rescale_factor(before, row_max[row]);
      row_sum[row] *= kept[row];
      const float relative_to = row_max[row] == -kInfinity ? 0.0f : row_max[row];  // nothing seen
#pragma unroll
      for (int i = 2 * row; i < kScores; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          scores[j] = fast_exp2(fmaf(scores[j], factor, -relative_to));
          row_sum[row] += scores[j];
        }
      }
    }
  }
};

}  // namespace kernelcat
