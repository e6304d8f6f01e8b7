// What a warp does with its 16 rows and its part of a KV tile: scores, online softmax, and the
// product with the values, all in registers (FlashAttention-2).
#pragma once

#include <kernelcat/running_softmax.cuh>
#include <kernelcat/sync.cuh>

#include "softcap.cuh"
#include "tiles.cuh"

namespace kernelcat {

// Tokens [begin, end) that each of a lane's two rows sees.
struct VisibleTokens {
  int begin[2], end[2];
};

// A score is q . k * factor. Without a softcap the multiplication is part of the exponentials'
// argument, and factor must not be negative; with one, the product is bounded by softcap.
struct ScoreScale {
  float factor, softcap;
};

// The pair (low, high) minus the pair `rounded`, in T.
template <typename T>
__device__ __forceinline__ uint32_t remainders(uint32_t rounded, float low, float high) {
  const T* pair = reinterpret_cast<const T*>(&rounded);
  return pack<T>(low - to_float(pair[0]), high - to_float(pair[1]));
}

// Column of an accumulator in shared memory, swizzled so that neighbouring rows lie in different
// banks; groups of eight columns stay together.
__device__ __forceinline__ int swizzled_column(int row, int column) {
  return column ^ (row % 4 * 8);
}

// Lane l has rows l / 4 and l / 4 + 8 in the layout of mma.sync's accumulators.
//
// Rounding a weight to 16 bits is off by up to 2^-9 of it (bfloat16). Values that cancel out
// magnify the error; over many tokens it averages out. So kPrecise multiplies the weights'
// remainders too. Without kPrecise only masked tiles do: those at the ends of what rows see, among
// them all tiles of rows with few visible tokens.
//
// kQuickCap bounds scores by cap_score, in 5 instructions a score; tanhf takes 15.
template <typename Kind, int kTokens, bool kPrecise, bool kQuickCap = false>
struct WarpAttention {
  using T = typename Kind::T;
  using Operands = KvOperands<Kind>;
  using Weight = typename Operands::Weight;
  static constexpr int kColumnGroups = Kind::kHeadDim / 8;
  static constexpr int kQuerySteps = Kind::kHeadDim / 16;
  static constexpr bool kHoldQueries = Kind::kHeadDim <= 128;  // else there are no registers left
  static_assert(kTokens % 16 == 0);
  using Scores = float[kTokens / 8][4];

  uint32_t queries[kHoldQueries ? kQuerySteps : 1][4];
  float accumulators[kColumnGroups][4];
  RunningSoftmax softmax;
  uint32_t query_tile;
  int first_row;

  // Rows `row` .. row + 15 of the query tile at shared-memory address `tile`.
  __device__ __forceinline__ void begin(uint32_t tile, int row) {
    query_tile = tile, first_row = row;
    if constexpr (kHoldQueries) {
#pragma unroll
      for (int i = 0; i < kQuerySteps; ++i) QueryTile<Kind>::load(queries[i], tile, row, i);
    }
#pragma unroll
    for (int i = 0; i < kColumnGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) accumulators[i][j] = 0.0f;
    }
    softmax = RunningSoftmax();
  }

  // Adds kTokens tokens: `token` .. of the sequence, which are rows `row` .. of both tiles.
  // `is_masked` says whether some row does not see some of them.
  __device__ __forceinline__ void attend(const ScaledTile& keys, const ScaledTile& values, int row,
                                         int token, bool is_masked, const VisibleTokens& visible,
                                         ScoreScale scale) {
    const int lane_token = lane_index() % 4 * 2;  // of scores[0][0], counted from the first token
    Scores scores = {};
    multiply_keys(scores, keys, row);
    if constexpr (Kind::kScales == Scales::kPage)
      multiply_by_scales(scores, keys, row + lane_token);
    if constexpr (Kind::kSoftcap) {
      bound_scores(scores, scale);
      scale.factor = 1.0f;
    }
    if (is_masked) mask_scores(scores, token + lane_token, visible);
    float rescale[2];
    softmax.add(scores, scale.factor, rescale);
#pragma unroll
    for (int i = 0; i < kColumnGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) accumulators[i][j] *= rescale[j / 2];
    }
    if constexpr (Kind::kScales == Scales::kPage)
      multiply_by_scales(scores, values, row + lane_token);
    if (kPrecise || is_masked) {
      multiply_values<true>(scores, values, row);
    } else {
      multiply_values<false>(scores, values, row);
    }
  }

  // Stores kCount columns from kFirst on as (16, kCount) floats, at swizzled columns.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void store(float* rows) const {
    const int lane = lane_index();
#pragma unroll
    for (int row = lane / 4, i = 0; i < 2; row += 8, ++i) {
      float* target = rows + row * kCount;
      if constexpr (kIsNvfp4<typename Kind::Cached>) {  // every fourth column, four times
#pragma unroll
        for (int column = 0; column < kCount; column += 32) {
          const int first = (kFirst + column) / 8;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int k = 2 * i + j;
            const int target_column = swizzled_column(row, column + lane % 4 * 8) + j * 4;
            *reinterpret_cast<float4*>(target + target_column) = {
                accumulators[first][k], accumulators[first + 1][k], accumulators[first + 2][k],
                accumulators[first + 3][k]};
          }
        }
        continue;
      }
#pragma unroll
      for (int column = 0; column < kCount; column += 16) {
        const float (&low)[4] = accumulators[(kFirst + column) / 8];
        const float (&high)[4] = accumulators[(kFirst + column) / 8 + 1];
        if constexpr (kIsFloat8<typename Kind::Cached>) {  // even columns, odd columns
          *reinterpret_cast<float4*>(target + swizzled_column(row, column + lane % 4 * 4)) = {
              low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1]};
        } else {
          const int pair = column + lane % 4 * 2;
          *reinterpret_cast<float2*>(target + swizzled_column(row, pair)) = {low[2 * i],
                                                                             low[2 * i + 1]};
          *reinterpret_cast<float2*>(target + swizzled_column(row, pair + 8)) = {high[2 * i],
                                                                                 high[2 * i + 1]};
        }
      }
    }
  }

 private:
  // By the pages' scales; `row` is that of scores[0][0] in the tile.
  static __device__ __forceinline__ void multiply_by_scales(Scores& scores, const ScaledTile& tile,
                                                            int row) {
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] *= tile.scales[row + 8 * i + j % 2];
    }
  }

  static __device__ __forceinline__ void bound_scores(Scores& scores, ScoreScale scale) {
    const float exponent = 2.0f * kLog2E * scale.factor;
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = kQuickCap ? cap_score(scores[i][j] * exponent, scale.softcap)
                                 : scale.softcap * tanhf(scores[i][j] * scale.factor);
      }
    }
  }

  // `first_token` is the token of scores[0][0].
  static __device__ __forceinline__ void mask_scores(Scores& scores, int first_token,
                                                     const VisibleTokens& visible) {
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = first_token + 8 * i + j % 2;
        if (token < visible.begin[j / 2] || token >= visible.end[j / 2]) scores[i][j] = -kInfinity;
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(Scores& scores, const ScaledTile& keys,
                                                int row) const {
#pragma unroll
    for (int piece = 0; piece < Operands::kPieces; ++piece) {
      uint32_t a[Operands::kSteps][4];
#pragma unroll
      for (int step = 0; step < Operands::kSteps; ++step) {
        const int i = piece * Operands::kSteps + step;
        if constexpr (kHoldQueries) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[step][j] = queries[i][j];
        } else {
          QueryTile<Kind>::load(a[step], query_tile, first_row, i);
        }
      }
#pragma unroll
      for (int i = 0; i < kTokens / 16; ++i) {
        uint32_t b[Operands::kSteps][2][2];
        Operands::load_keys(b, keys, row + 16 * i, piece);
#pragma unroll
        for (int step = 0; step < Operands::kSteps; ++step) {
          mma_16x8x16<T>(scores[2 * i], a[step], b[step][0][0], b[step][0][1]);
          mma_16x8x16<T>(scores[2 * i + 1], a[step], b[step][1][0], b[step][1][1]);
        }
      }
    }
  }

  // kRemainders also multiplies what rounding took from the weights.
  template <bool kRemainders>
  __device__ __forceinline__ void multiply_values(const Scores& weights, const ScaledTile& values,
                                                  int row) {
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      uint32_t a[4], rest[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = weights[2 * i + j / 2][j % 2 * 2];
        const float high = weights[2 * i + j / 2][j % 2 * 2 + 1];
        a[j] = pack<Weight>(low, high);
        if constexpr (kRemainders) rest[j] = remainders<Weight>(a[j], low, high);
      }
#pragma unroll
      for (int piece = 0; piece < Operands::kPieces; ++piece) {
        uint32_t b[2 * Operands::kSteps][2];
        Operands::load_values(b, values, row + 16 * i, piece);
#pragma unroll
        for (int j = 0; j < 2 * Operands::kSteps; ++j) {
          float (&accumulator)[4] = accumulators[piece * 2 * Operands::kSteps + j];
          mma_16x8x16<Weight>(accumulator, a, b[j][0], b[j][1]);
          if constexpr (kRemainders) mma_16x8x16<Weight>(accumulator, rest, b[j][0], b[j][1]);
        }
      }
    }
  }
};

}  // namespace kernelcat
