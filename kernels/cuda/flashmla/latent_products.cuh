// What the consumer warpgroups of flashmla/wgmma and pair share: 64 rows, half of the columns.
#pragma once

#include <kernelcat/sync.cuh>
#include <kernelcat/wgmma.cuh>
#include <kernelcat/wgmma_rs.cuh>

#include "latent.cuh"
#include "latent_softmax.cuh"

namespace kernelcat {

constexpr int kHalfLatent = kLatent / 2;
constexpr int kClearBarrier = 4;  // named barriers kClearBarrier + warpgroup

// Keeps the compiler from precomputing all descriptors that follow from this one: they would take
// registers.
__device__ __forceinline__ uint64_t opaque(uint64_t descriptor) {
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}

// Rows of a warpgroup against kTokens tokens at a time, in the layout of wgmma's accumulators: lane
// l has rows l / 4 and l / 4 + 8 of its warp's 16.
template <typename T, int kTokens>
struct LatentRows {
  static constexpr int kSteps = kTokens / kWgmmaK;
  using Scores = float[kTokens / 2];
  using Weights = uint32_t[kSteps][4];

  float accumulators[kHalfLatent / 2];
  LatentSoftmax softmax;
  int last_visible[2];  // the last tokens that the two rows see
  int all_end;          // all rows see the tokens before this one

  // `first` is the upper one of the lane's two rows.
  template <typename Segment>
  __device__ __forceinline__ void begin(const Segment& segment, int first, int heads) {
    softmax = LatentSoftmax();
#pragma unroll
    for (float& value : accumulators) value = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) last_visible[i] = segment.last_visible(first + 8 * i, heads);
    all_end = segment.last_visible(0, heads) + 1;
  }

  // Most KV tiles do not raise a row max.
  __device__ __forceinline__ void rescale_accumulators(const float (&rescale)[2]) {
    if (!__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHalfLatent / 2; ++i) accumulators[i] *= rescale[i / 2 % 2];
  }

  // Replaces the scores of tokens `token` .. by exponentials relative to softmax.row_max; the
  // accumulators must then be multiplied by `rescale`.
  __device__ __forceinline__ void exponentiate(Scores& scores, int token, float factor,
                                               float (&rescale)[2]) {
    if (token + kTokens > all_end) mask_scores(scores, token);
    softmax.add(scores, factor, rescale);
  }

  // Rounds weights to the operands of the product with the values.
  static __device__ __forceinline__ void round(const Scores& scores, Weights& weights) {
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      weights[i / 4][i % 4] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // Starts accumulators += weights @ values, whose chunks of 64 columns begin at `values`.
  __device__ __forceinline__ void multiply_values(Weights& weights, const uint8_t* values) {
    constexpr int kChunkBytes = kTokens * kRowBytes;
    const uint64_t b = opaque(swizzled_values_descriptor(shared_address(values), kChunkBytes));
    pin(accumulators);
    pin(weights);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t values_k = advanced(b, k * kWgmmaK * kRowBytes);
      WgmmaRs<T, kHalfLatent, OperandB::kRowsOfK>::multiply(accumulators, weights[k], values_k,
                                                            true);
    }
    wgmma_commit();
    pin(accumulators);
  }

 private:
  __device__ __forceinline__ void mask_scores(Scores& scores, int token) const {
    const int first = token + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      if (first + i / 4 * 8 + i % 2 > last_visible[i / 2 % 2]) scores[i] = -kInfinity;
    }
  }
};

// Zeroes tokens `first` .. of `num_chunks` chunks of values, by the threads of warpgroup
// `warpgroup`: slots that hold no token of the sequence may hold NaN, which a weight of zero does
// not remove.
template <int kTokens>
__device__ __forceinline__ void clear_tokens(uint8_t* chunks, int num_chunks, int first,
                                             int warpgroup) {
  constexpr int kUnits = kRowBytes / 16;
  const int units = (kTokens - first) * kUnits;
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    uint4* rows = reinterpret_cast<uint4*>(chunks + chunk * (kTokens * kRowBytes)) + first * kUnits;
    for (int i = threadIdx.x % kWarpgroupThreads; i < units; i += kWarpgroupThreads) rows[i] = {};
  }
  fence_async_shared();
  named_barrier_sync(kClearBarrier + warpgroup, kWarpgroupThreads);
}

}  // namespace kernelcat
