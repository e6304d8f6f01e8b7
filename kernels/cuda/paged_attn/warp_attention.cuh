// A warp's 16 rows against its share of a tile of tokens: scores, a running softmax, and the
// product with the values, all in registers (FlashAttention-2).
#pragma once

#include <kernelcat/sync.cuh>

#include "running_softmax.cuh"
#include "tiles.cuh"

namespace kernelcat {

// Tokens [begin, end) that each of a lane's two rows sees.
struct Visible {
  int begin[2], end[2];
};

// What becomes of q . k. Without kSoftcap: times `factor` (>= 0), which is part of the
// exponentials' argument. With it: times `factor`, then bounded.
struct ScoreScale {
  float factor, softcap;
};

// What rounding to the pair `rounded` took from `low` and `high`.
template <typename T>
__device__ __forceinline__ uint32_t remainders(uint32_t rounded, float low, float high) {
  const T* pair = reinterpret_cast<const T*>(&rounded);
  return pack<T>(low - to_float(pair[0]), high - to_float(pair[1]));
}

// Swizzled so that neighbouring rows lie in different banks; groups of eight stay together.
__device__ __forceinline__ int place_of_sum(int row, int column) {
  return column ^ (row % 4 * 8);
}

// Lane l holds, of rows l / 4 and l / 4 + 8, what mma.sync leaves it.
//
// Weights rounded to 16 bits are off by up to 2^-9 (bfloat16), which values that cancel out
// magnify; it averages out over many tokens. kPrecise always multiplies the remainders too;
// otherwise the tiles at the ends of what rows see do, among them all that rows with few tokens
// have.
template <typename Kind, int kTokens, bool kPrecise>
struct WarpAttention {
  using T = typename Kind::T;
  using Tile = CacheTile<Kind>;
  using Weight = typename Tile::Weight;
  static constexpr int kColumns = Kind::kHeadDim / 8;
  static constexpr int kQuerySteps = Kind::kHeadDim / 16;
  static constexpr bool kHoldQueries = Kind::kHeadDim <= 128;  // else there are no registers left
  static_assert(kTokens % 16 == 0);

  uint32_t queries[kHoldQueries ? kQuerySteps : 1][4];
  float sums[kColumns][4];
  RunningSoftmax softmax;
  uint32_t query_tile;
  int first_row;

  __device__ __forceinline__ void begin(uint32_t tile, int row) {
    query_tile = tile, first_row = row;
    if constexpr (kHoldQueries) {
#pragma unroll
      for (int i = 0; i < kQuerySteps; ++i) QueryTile<Kind>::load(queries[i], tile, row, i);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;
    }
    softmax = RunningSoftmax();
  }

  // Tokens `token` .. of the sequence, which are rows `row` .. of both tiles. `hides` says whether
  // some row does not see some of them.
  __device__ __forceinline__ void attend(const ScaledTile& keys, const ScaledTile& values, int row,
                                         int token, bool hides, const Visible& visible,
                                         ScoreScale scale) {
    float scores[kTokens / 8][4] = {};
    multiply_keys(scores, keys, row);
    const int column = lane_index() % 4 * 2;
    if constexpr (Kind::kScales == Scales::kPage) {
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[i][j] *= keys.scales[row + 8 * i + column + j % 2];
      }
    }
    if constexpr (Kind::kSoftcap) {
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          scores[i][j] = scale.softcap * tanhf(scores[i][j] * scale.factor);
      }
      scale.factor = 1.0f;
    }
    if (hides) {
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int own = token + 8 * i + column + j % 2;
          if (own < visible.begin[j / 2] || own >= visible.end[j / 2]) scores[i][j] = -kInfinity;
        }
      }
    }
    float kept[2];
    softmax.add(scores, scale.factor, kept);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] *= kept[j / 2];
    }
    if constexpr (Kind::kScales == Scales::kPage) {
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[i][j] *= values.scales[row + 8 * i + column + j % 2];
      }
    }
    if (kPrecise || hides) {
      multiply_values<true>(scores, values, row);
    } else {
      multiply_values<false>(scores, values, row);
    }
  }

  // kCount columns from kFirst on, in rows of kCount floats; `place_of_sum` says where in a row.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void store(float* rows) const {
    const int lane = lane_index();
#pragma unroll
    for (int row = lane / 4, i = 0; i < 2; row += 8, ++i) {
      float* own = rows + row * kCount;
      if constexpr (kIsNvfp4<typename Kind::Cached>) {  // every fourth column, four times
#pragma unroll
        for (int column = 0; column < kCount; column += 32) {
          const int first = (kFirst + column) / 8;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int k = 2 * i + j, place = place_of_sum(row, column + lane % 4 * 8) + j * 4;
            *reinterpret_cast<float4*>(own + place) = {sums[first][k], sums[first + 1][k],
                                                       sums[first + 2][k], sums[first + 3][k]};
          }
        }
        continue;
      }
#pragma unroll
      for (int column = 0; column < kCount; column += 16) {
        const float (&low)[4] = sums[(kFirst + column) / 8];
        const float (&high)[4] = sums[(kFirst + column) / 8 + 1];
        if constexpr (kIsFloat8<typename Kind::Cached>) {  // even columns, odd columns
          *reinterpret_cast<float4*>(own + place_of_sum(row, column + lane % 4 * 4)) = {
              low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1]};
        } else {
          const int pair = column + lane % 4 * 2;
          *reinterpret_cast<float2*>(own + place_of_sum(row, pair)) = {low[2 * i], low[2 * i + 1]};
          *reinterpret_cast<float2*>(own + place_of_sum(row, pair + 8)) = {high[2 * i],
                                                                           high[2 * i + 1]};
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply_keys(float (&scores)[kTokens / 8][4],
                                                const ScaledTile& keys, int row) const {
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      uint32_t a[Tile::kSteps][4];
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
        const int i = block * Tile::kSteps + step;
        if constexpr (kHoldQueries) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[step][j] = queries[i][j];
        } else {
          QueryTile<Kind>::load(a[step], query_tile, first_row, i);
        }
      }
#pragma unroll
      for (int i = 0; i < kTokens / 16; ++i) {
        uint32_t b[Tile::kSteps][2][2];
        Tile::load_keys(b, keys, row + 16 * i, block);
#pragma unroll
        for (int step = 0; step < Tile::kSteps; ++step) {
          mma_16x8x16<T>(scores[2 * i], a[step], b[step][0][0], b[step][0][1]);
          mma_16x8x16<T>(scores[2 * i + 1], a[step], b[step][1][0], b[step][1][1]);
        }
      }
    }
  }

  // kRemainders adds what the weights' rounding to T leaves out.
  template <bool kRemainders>
  __device__ __forceinline__ void multiply_values(const float (&weights)[kTokens / 8][4],
                                                  const ScaledTile& values, int row) {
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
      for (int block = 0; block < Tile::kBlocks; ++block) {
        uint32_t b[2 * Tile::kSteps][2];
        Tile::load_values(b, values, row + 16 * i, block);
#pragma unroll
        for (int j = 0; j < 2 * Tile::kSteps; ++j) {
          float (&sum)[4] = sums[block * 2 * Tile::kSteps + j];
          mma_16x8x16<Weight>(sum, a, b[j][0], b[j][1]);
          if constexpr (kRemainders) mma_16x8x16<Weight>(sum, rest, b[j][0], b[j][1]);
        }
      }
    }
  }
};

}  // namespace kernelcat
