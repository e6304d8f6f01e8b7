// What the consumer warpgroups of flashmla/wgmma and pair have in common: 64 rows, half of the
// columns.
#pragma once

#include <kernelcat/sync.cuh>
#include <kernelcat/wgmma.cuh>
#include <kernelcat/wgmma_rs.cuh>

#include "latent.cuh"
#include "latent_softmax.cuh"

namespace kernelcat {

constexpr int kHalfLatent = kLatent / 2;
constexpr int kOwnBarrier = 4;  // and one for the other warpgroup; wgmma has 1, 2, and 3

// Keeps the compiler from holding all that follows from a descriptor in registers.
__device__ __forceinline__ uint64_t opaque(uint64_t descriptor) {
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}

// Sums of kTokens tokens at a time, and of which rows: lane l of a warp has rows l / 4 and
// l / 4 + 8 of its 16, as wgmma leaves them.
template <typename T, int kTokens>
struct LatentRows {
  static constexpr int kSteps = kTokens / kWgmmaK;
  using Scores = float[kTokens / 2];
  using Weights = uint32_t[kSteps][4];

  float out[kHalfLatent / 2];
  LatentSoftmax softmax;
  int limit[2];   // the last tokens that the lane's two rows see
  int clear_end;  // tokens before this one are seen by all

  // `first` is the upper one of the lane's two rows.
  template <typename Segment>
  __device__ __forceinline__ void begin(const Segment& segment, int first, int heads) {
    softmax = LatentSoftmax();
#pragma unroll
    for (float& value : out) value = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) limit[i] = segment.limit(first + 8 * i, heads);
    clear_end = segment.limit(0, heads) + 1;
  }

  // Few tiles change anything.
  __device__ __forceinline__ void rescale_sums(const float (&kept)[2]) {
    if (!__any_sync(0xffffffff, kept[0] != 1.0f || kept[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHalfLatent / 2; ++i) out[i] *= kept[i / 2 % 2];
  }

  // Scores of tokens `token` .. become exponentials, relative to softmax.row_max.
  __device__ __forceinline__ void exponentiate(Scores& scores, int token, float factor,
                                               float (&kept)[2]) {
    if (token + kTokens > clear_end) hide(scores, token);
    softmax.add(scores, factor, kept);
  }

  // As operands of the values' product.
  static __device__ __forceinline__ void round(const Scores& scores, Weights& weights) {
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      weights[i / 4][i % 4] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // Starts out += weights @ values, whose chunks of 64 columns begin at `values`.
  __device__ __forceinline__ void multiply_values(Weights& weights, const uint8_t* values) {
    constexpr int kChunkBytes = kTokens * kRowBytes;
    const uint64_t b = opaque(swizzled_values_descriptor(shared_address(values), kChunkBytes));
    pin(out);
    pin(weights);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t sixteen = advanced(b, k * kWgmmaK * kRowBytes);
      WgmmaRs<T, kHalfLatent, OperandB::kRowsOfK>::multiply(out, weights[k], sixteen, true);
    }
    wgmma_commit();
    pin(out);
  }

 private:
  __device__ __forceinline__ void hide(Scores& scores, int token) const {
    const int first = token + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      if (first + i / 4 * 8 + i % 2 > limit[i / 2 % 2]) scores[i] = -kInfinity;
    }
  }
};

// Slots that hold none of the sequence's tokens may hold NaN, which weights of zero do not undo:
// zeros from token `first` on, of `num_chunks` chunks, by warpgroup `warpgroup`.
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
  named_barrier_sync(kOwnBarrier + warpgroup, kWarpgroupThreads);
}

}  // namespace kernelcat
