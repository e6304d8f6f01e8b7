// Rows of activations in registers, in the order of mma.sync's left operand, and their RMSNorm.
#pragma once

#include <kernelcat/row_ring.cuh>
#include <kernelcat/warp_sum.cuh>

namespace kernelcat {

// What becomes of a row x of activations before it is multiplied by weights.
enum class RowNorm {
  kNone,    // nothing
  kBefore,  // x / root * norm_weight, where root is the root of the mean square of x, plus eps
  kAfter,   // x * norm_weight; the products are divided by the root. No pass over x comes before.
};

// float16 divides first: x * norm_weight could exceed its largest value.
template <typename T>
constexpr RowNorm kRowNorm = RowNorm::kAfter;
template <>
constexpr RowNorm kRowNorm<float16> = RowNorm::kBefore;

template <typename T>
struct ActivationRows {
  const T* x;            // (tokens, k), k a multiple of 8
  const T* norm_weight;  // (k,), or null without a norm
  int tokens, k;
  float eps;

  __device__ __forceinline__ const uint4* at(int token, int col) const {
    return reinterpret_cast<const uint4*>(x + static_cast<int64_t>(token) * k + col);
  }

  // 1 / root. The instructions for it are exact to two units in the last place of a float.
  __device__ __forceinline__ float inverse_root(float sum_squares) const {
    return rsqrtf(__fdividef(sum_squares, static_cast<float>(max(k, 1))) + eps);
  }
};

template <typename T>
__device__ __forceinline__ float sum_squares(const uint4& vector) {
  const T* elements = reinterpret_cast<const T*>(&vector);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float value = to_float(elements[i]);
    sum = fmaf(value, value, sum);
  }
  return sum;
}

// The sum of the squares of a row, in all lanes of the warp.
template <typename T>
__device__ __forceinline__ float warp_sum_squares(const ActivationRows<T>& rows, int token) {
  float sum = 0.0f;
  for (int col = lane_index() * 8; col < rows.k; col += kWarpThreads * 8) {
    sum += sum_squares<T>(*rows.at(token, col));
  }
  return warp_sum(sum);
}

// Eight elements times `factor` and their norm weights, rounded to T.
template <typename T>
__device__ __forceinline__ uint4 scaled(const uint4& x, float factor, const uint4& norm_weight) {
  const T* values = reinterpret_cast<const T*>(&x);
  const T* weights = reinterpret_cast<const T*>(&norm_weight);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = pack<T>(to_float(values[2 * i]) * factor * to_float(weights[2 * i]),
                       to_float(values[2 * i + 1]) * factor * to_float(weights[2 * i + 1]));
  }
  return {words[0], words[1], words[2], words[3]};
}

// A warp's part of a slice: kChunks chunks of kTokens rows. A lane has 16 adjacent bytes of a row
// in a chunk, and the same 16 bytes of a row of weights: this permutes the columns of a chunk alike
// in both operands.
template <typename T, RowNorm kNorm, int kTokens, int kNumWarps, int kChunks>
struct LeftOperand {
  static constexpr int kHalves = kTokens / 8;  // eight tokens are half of the rows of a product

  uint4 words[kChunks][kHalves];

  // Token `half * 8 + lane / 4`, columns from `col + chunk * kNumWarps * kChunkCols` on. The
  // squares of the elements are added to `squares`; rows are multiplied by `factors`.
  __device__ __forceinline__ void load(const ActivationRows<T>& rows, int col,
                                       float (&squares)[kHalves], const float (&factors)[kHalves]) {
    constexpr int kStep = kNumWarps * kChunkCols;  // from one chunk of the warp to the next
    const int token = lane_index() / 4;
    const uint4* row = rows.at(token, col);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        words[c][h] = uint4{};
        if (col + c * kStep < rows.k && token + h * 8 < rows.tokens) {
          words[c][h] = row[c * (kStep / 8)];
        }
      }
      row += rows.k;  // eight rows of vectors of eight elements
    }
    if constexpr (kNorm != RowNorm::kNone) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int chunk_col = col + c * kStep;
        uint4 weights = {};
        if (chunk_col < rows.k) {
          weights = __ldg(reinterpret_cast<const uint4*>(rows.norm_weight + chunk_col));
        }
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          if constexpr (kNorm == RowNorm::kAfter) squares[h] += sum_squares<T>(words[c][h]);
          words[c][h] = scaled<T>(words[c][h], factors[h], weights);
        }
      }
    }
  }

  // The operand of step 0 or 1 of a chunk, for tokens 16 * tile on.
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int chunk, int tile, int step) const {
    const uint4& upper = words[chunk][2 * tile];
    a[0] = step == 0 ? upper.x : upper.z;
    a[2] = step == 0 ? upper.y : upper.w;
    a[1] = a[3] = 0;
    if constexpr (kHalves > 1) {
      const uint4& lower = words[chunk][2 * tile + 1];
      a[1] = step == 0 ? lower.x : lower.z;
      a[3] = step == 0 ? lower.y : lower.w;
    }
  }
};

}  // namespace kernelcat
