// The online softmax of flashmla/wgmma and pair, which rescales the 64 x 512 accumulators rarely.
#pragma once

#include <kernelcat/running_softmax.cuh>

namespace kernelcat {

// Exponentials are relative to a row max that may lag kSlack (in base 2) behind the tile_max score
// so far: accumulators are rescaled only where a score exceeds it by more (after FlashAttention-4).
// Weights are then up to 256, which float16 holds with as many bits as below 1.
struct LatentSoftmax : RunningSoftmax {
  static constexpr float kSlack = 8.0f;

  // Replaces scores, in the layout of wgmma's accumulators, by exponentials. Accumulators of
  // earlier tiles must then be multiplied by `rescale`. `factor` must not be negative.
  template <int kScores>
  __device__ __forceinline__ void add(float (&scores)[kScores], float factor, float (&rescale)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float tile_max = fmaxf(scores[2 * row], scores[2 * row + 1]);
#pragma unroll
      for (int i = 4; i < kScores; i += 4) {
        tile_max = fmaxf(tile_max, fmaxf(scores[i + 2 * row], scores[i + 2 * row + 1]));
      }
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 1));
      tile_max = factor * fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 2));
      const float old_max = row_max[row];
      if (tile_max > old_max + kSlack) row_max[row] = tile_max;
      rescale[row] = rescale_factor(old_max, row_max[row]);
      row_sum[row] *= rescale[row];
      const float base = row_max[row] == -kInfinity ? 0.0f : row_max[row];  // no visible token
#pragma unroll
      for (int i = 2 * row; i < kScores; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; ++j) {
          scores[j] = fast_exp2(fmaf(scores[j], factor, -base));
          row_sum[row] += scores[j];
        }
      }
    }
  }
};

}  // namespace kernelcat
