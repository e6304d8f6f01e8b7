// The rows of a warp that decodes: their queries, online softmax and accumulators, in the layout of
// transposed products. The tokens, then the columns of the values, are mma.sync's 16 rows, and the
// query rows are its 8 columns. Where keys and values come from is the matter of the classes
// derived from DecodeRowState.
#pragma once

#include <kernelcat/fp8_to_fp16.cuh>
#include <kernelcat/fragments.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/sequences.cuh>

#include "softcap.cuh"
#include "tile_rows.cuh"

namespace kernelcat {

// The type in which both products are multiplied. Float8 becomes float16, by one instruction a
// pair; bfloat16 queries are then divided by a power of two so that they fit (scale_to_float16).
template <typename Kind>
struct DecodeOperand {
  using T = typename Kind::T;
};
template <typename T_, int kHeadDim, int kPageSize, bool kWindow, bool kSoftcap, bool kSinks,
          Scales kScales>
struct DecodeOperand<
    AttentionKind<T_, float8_e4m3fn, kHeadDim, kPageSize, kWindow, kSoftcap, kSinks, kScales>> {
  using T = float16;
};

// Each of kHeads key-value heads, which are neighbours in the cache, has kRowTiles times 8 rows:
// kGroups groups of 8 rows. Of every group and every 16 tokens, lane l has the scores of rows
// 2 * (l % 4) + {0, 1} and tokens l / 4 and l / 4 + 8.
template <typename Kind, int kHeads, int kRowTiles, int kTokens>
struct DecodeRowState {
  using T = typename Kind::T;
  using Operand = typename DecodeOperand<Kind>::T;
  static constexpr bool kFloat8 = kIsFloat8<typename Kind::Cached>;
  static constexpr int kHeadDim = Kind::kHeadDim, kGroups = kHeads * kRowTiles;
  static constexpr int kTokenSteps = kTokens / 16, kSteps = kHeadDim / 16;
  static constexpr bool kScaledQueries = kFloat8 && kIsBfloat16<T>;  // by powers of two
  using Scores = float[kTokenSteps][kGroups][4];

  uint32_t queries[kGroups][kSteps][2];
  float accumulators[kSteps][kGroups][4];
  float row_max[kGroups][2];
  float row_sum[kGroups][2];       // of the lane's tokens, until reduce_row_sums()
  float score_factor[kGroups][2];  // in base 2; with a softcap it gives cap_score's exponent
  int last_visible[kRowTiles][2];  // the last token that a row sees

  // Loads the queries and clears the accumulators. `first` has the rows of the first head; a head's
  // rows from `num_rows` on are zero. `load(words, query)` reads the lane's part of a query.
  template <typename Load>
  __device__ __forceinline__ void begin(const AttentionArgs<Kind>& args,
                                        const TileRows<Kind>& first, int num_rows,
                                        const Sequence& sequence, Load load) {
    const int lane = lane_index(), group_heads = args.group();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const TileRows<Kind> rows = first.of_head(g / kRowTiles);
      float scale = args.sm_scale * kLog2E;
      if constexpr (Kind::kSoftcap) scale *= 2.0f / args.softcap;
      if constexpr (Kind::kScales == Scales::kHead) scale *= args.k_scale[rows.kv_head];
      const int r = g % kRowTiles, row = 8 * r + lane / 4;
      uint32_t (&words)[kSteps][2] = queries[g];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) words[step][0] = words[step][1] = 0;
      if (row < num_rows) load(words, args.q + rows.index(args, row) * kHeadDim);
      float query_factor = scale;  // of the row of `words`
      if constexpr (kScaledQueries) query_factor *= scale_to_float16(words);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int score_row = lane % 4 * 2 + j;  // of the row of the lane's scores
        score_factor[g][j] =
            kScaledQueries ? __shfl_sync(0xffffffff, query_factor, 4 * score_row) : scale;
        last_visible[r][j] =
            sequence.context() + min(8 * r + score_row, num_rows - 1) / group_heads;
        row_max[g][j] = -kInfinity, row_sum[g][j] = 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) accumulators[step][g][j] = 0.0f;
      }
    }
  }

  // Adds up the row sums of the lanes that share a row, in all of them.
  __device__ __forceinline__ void reduce_row_sums() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int step = 4; step < kWarpThreads; step *= 2) {
          row_sum[g][j] += __shfl_xor_sync(0xffffffff, row_sum[g][j], step);
        }
      }
    }
  }

 protected:
  __device__ __forceinline__ void scale_scores(Scores& scores,
                                               const AttentionArgs<Kind>& args) const {
#pragma unroll
    for (int t = 0; t < kTokenSteps; ++t) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& score = scores[t][g][j];
          score *= score_factor[g][j % 2];
          if constexpr (Kind::kSoftcap) score = cap_score(score, args.softcap * kLog2E);
        }
      }
    }
  }

  __device__ __forceinline__ void mask_scores(Scores& scores, int first_token, int window) const {
#pragma unroll
    for (int t = 0; t < kTokenSteps; ++t) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int token = first_token + 16 * t + lane_index() / 4 + j / 2 * 8;
          const int ahead = token - last_visible[g % kRowTiles][j % 2];
          if (ahead > 0 || (Kind::kWindow && ahead <= -window)) scores[t][g][j] = -kInfinity;
        }
      }
    }
  }

  // Scores become weights. After the first few tiles the row max rarely grows, and accumulators
  // stay as they are.
  __device__ __forceinline__ void exponentiate(Scores& scores) {
    float lane_max[kGroups][2];
    bool grows = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        lane_max[g][j] = fmaxf(scores[0][g][j], scores[0][g][j + 2]);
#pragma unroll
        for (int t = 1; t < kTokenSteps; ++t) {
          lane_max[g][j] = fmaxf(lane_max[g][j], scores[t][g][j]);
          lane_max[g][j] = fmaxf(lane_max[g][j], scores[t][g][j + 2]);
        }
        grows |= lane_max[g][j] > row_max[g][j];
      }
    }
    if (__any_sync(0xffffffff, grows)) raise_row_max(lane_max);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float base = row_max[g][j % 2] == -kInfinity ? 0.0f : row_max[g][j % 2];
#pragma unroll
        for (int t = 0; t < kTokenSteps; ++t) {
          scores[t][g][j] = fast_exp2(scores[t][g][j] - base);
          row_sum[g][j % 2] += scores[t][g][j];
        }
      }
    }
  }

  __device__ __forceinline__ void raise_row_max(float (&lane_max)[kGroups][2]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& new_max = lane_max[g][j];
#pragma unroll
        for (int step = 4; step < kWarpThreads; step *= 2) {
          new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffff, new_max, step));
        }
        new_max = fmaxf(new_max, row_max[g][j]);
        const float rescale = rescale_factor(row_max[g][j], new_max);
        row_max[g][j] = new_max;
        row_sum[g][j] *= rescale;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          accumulators[step][g][j] *= rescale;
          accumulators[step][g][j + 2] *= rescale;
        }
      }
    }
  }

  // The weights of 16 tokens as operands of the products with the values.
  static __device__ __forceinline__ void weight_operands(uint32_t (&b)[kGroups][2],
                                                         const float (&weights)[kGroups][4]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float (&four)[4] = weights[g];
      b[g][0] = transposed(pack<Operand>(four[0], four[1]));
      b[g][1] = transposed(pack<Operand>(four[2], four[3]));
    }
  }

  __device__ __forceinline__ void multiply_queries(float (&scores)[kGroups][4],
                                                   const uint32_t (&a)[4], int head,
                                                   int step) const {
#pragma unroll
    for (int g = head * kRowTiles; g < (head + 1) * kRowTiles; ++g) {
      mma_16x8x16<Operand>(scores[g], a, queries[g][step][0], queries[g][step][1]);
    }
  }

  __device__ __forceinline__ void multiply_weights(int head, int step, const uint32_t (&a)[4],
                                                   const uint32_t (&b)[kGroups][2]) {
#pragma unroll
    for (int g = head * kRowTiles; g < (head + 1) * kRowTiles; ++g) {
      mma_16x8x16<Operand>(accumulators[step][g], a, b[g][0], b[g][1]);
    }
  }
};

}  // namespace kernelcat
