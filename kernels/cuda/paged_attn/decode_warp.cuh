// What a warp of paged_attn/tma does with a KV tile that TMA loaded: scores, online softmax, and
// the product with the values. All products are transposed: the tokens, then the columns of the
// values, are mma.sync's 16 rows, and the query rows are its 8 columns.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/fp8_to_fp16.cuh>
#include <kernelcat/fragments.cuh>
#include <kernelcat/softmax.cuh>
#include <kernelcat/sync.cuh>

#include "merge.cuh"
#include "tiles.cuh"
#include "work_list.cuh"

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
struct DecodeWarp {
  using T = typename Kind::T;
  using Operand = typename DecodeOperand<Kind>::T;
  static constexpr bool kFloat8 = kIsFloat8<typename Kind::Cached>;
  static constexpr int kHeadDim = Kind::kHeadDim, kGroups = kHeads * kRowTiles;
  // A KV tile lies as chunks of kSpan bytes of every token.
  static constexpr int kTokenBytes = kHeads * Kind::kRowBytes;
  static constexpr int kSpan = kTokenBytes < 128 ? kTokenBytes : 128;
  static constexpr int kChunks = kTokenBytes / kSpan;
  static constexpr int kChunkColumns = kHeads * kHeadDim / kChunks;
  static constexpr int kTileBytes = kTokens * kTokenBytes;  // of keys, and of values
  static constexpr int kBoxTokens = kTokens < Kind::kPageSize ? kTokens : Kind::kPageSize;
  static constexpr int kBoxes = kTokens / kBoxTokens;
  static constexpr int kTokenSteps = kTokens / 16, kSteps = kHeadDim / 16;
  static constexpr int kUnits = kSpan / 16;                // 16-byte units in a chunk's row
  static constexpr int kUnitPairs = Kind::kRowBytes / 32;  // pairs of units of a head
  static constexpr bool kScaledQueries = kFloat8 && kIsBfloat16<T>;  // by powers of two
  static_assert(kBoxTokens % 8 == 0);

  uint32_t queries[kGroups][kSteps][2];
  float accumulators[kSteps][kGroups][4];
  float row_max[kGroups][2];
  float row_sum[kGroups][2];       // of the lane's tokens, until reduce_row_sums()
  float score_factor[kGroups][2];  // in base 2, or before the softcap
  int last_visible[kRowTiles][2];  // the last token that a row sees

  // The column of a head that accumulators[step][..][2 * half + {0, 1}] belong to.
  static __device__ __forceinline__ int column(int step, int half) {
    const int row = lane_index() / 4;  // of mma.sync's
    return 16 * step + (kFloat8 ? 2 * row + half : row + 8 * half);
  }

  // Loads the queries and clears the accumulators. `first` has the rows of the first head; a head's
  // rows from `num_rows` on are zero.
  __device__ __forceinline__ void begin(const AttentionArgs<Kind>& args,
                                        const TileRows<Kind>& first, int num_rows,
                                        const Sequence& sequence) {
    const int lane = lane_index(), group_heads = args.group();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const TileRows<Kind> rows = first.of_head(g / kRowTiles);
      float scale = Kind::kSoftcap ? args.sm_scale / args.softcap : args.sm_scale * kLog2E;
      if constexpr (Kind::kScales == Scales::kHead) scale *= args.k_scale[rows.kv_head];
      const int r = g % kRowTiles, row = 8 * r + lane / 4;
      uint32_t (&words)[kSteps][2] = queries[g];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) words[step][0] = words[step][1] = 0;
      if (row < num_rows) {
        const T* query = args.q + rows.index(args, row) * kHeadDim;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if constexpr (kFloat8) {  // four neighbours, as multiply_keys() has the keys
            const uint2 four = *reinterpret_cast<const uint2*>(query + 16 * step + lane % 4 * 4);
            words[step][0] = four.x, words[step][1] = four.y;
          } else {
            const T* pair = query + 16 * step + lane % 4 * 2;
            words[step][0] = *reinterpret_cast<const uint32_t*>(pair);
            words[step][1] = *reinterpret_cast<const uint32_t*>(pair + 8);
          }
        }
      }
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

  // Zeroes the values of a stage outside tokens [first_token, end_token): slots that hold no
  // visible token may hold NaN, which a weight of zero does not remove. `token` is the tile's
  // first.
  __device__ __forceinline__ void clear_values(uint8_t* stage, int token, int first_token,
                                               int end_token) const {
    for (int i = lane_index(); i < kTokens * (kTokenBytes / 16); i += kWarpThreads) {
      const int unit_token = i / kUnits % kTokens + token;
      if (unit_token < first_token || unit_token >= end_token) {
        reinterpret_cast<uint4*>(stage + kTileBytes)[i] = {};
      }
    }
    fence_async_shared();  // TMA writes there next
    __syncwarp();
  }

  // Adds tokens `token` .. of the sequence. The stage has their keys, then their values;
  // `is_masked` says whether some row does not see some of them.
  __device__ __forceinline__ void attend(uint32_t stage, int token, bool is_masked,
                                         const AttentionArgs<Kind>& args) {
    float scores[kTokenSteps][kGroups][4] = {};
    multiply_keys(scores, stage);
    scale_scores(scores, args);
    if (is_masked) mask_scores(scores, token, args.window);
    exponentiate(scores);
    multiply_values(scores, stage + kTileBytes);
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

 private:
  using Scores = float[kTokenSteps][kGroups][4];

  // Offset of a 16-byte unit in a tile, swizzled for the lane's row of an 8x8 matrix; the row's own
  // offset is to be added.
  static __device__ __forceinline__ uint32_t unit_offset(int unit) {
    const int mask = lane_index() % 8 / (8 / kUnits) % kUnits;
    return unit / kUnits * (kTokens * kSpan) + (unit % kUnits ^ mask) * 16;
  }

  __device__ __forceinline__ void multiply_keys(Scores& scores, uint32_t tile) const {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kHeads * kUnitPairs; ++i) {
      const int head = i / kUnitPairs, pair = i % kUnitPairs;
      const uint32_t units = tile + lane % 16 * kSpan + unit_offset(2 * i + lane / 16);
#pragma unroll
      for (int t = 0; t < kTokenSteps; ++t) {
        uint32_t words[4];  // tokens 0-7 and 8-15 of the first unit, then of the second
        load_matrices(words, units + t * 16 * kSpan);
        if constexpr (kFloat8) {
#pragma unroll
          for (int unit = 0; unit < 2; ++unit) {
            const uint32_t a[4] = {
                e4m3_to_float16(words[2 * unit]), e4m3_to_float16(words[2 * unit + 1]),
                e4m3_to_float16(words[2 * unit] >> 16), e4m3_to_float16(words[2 * unit + 1] >> 16)};
            multiply_queries(scores[t], a, head, 2 * pair + unit);
          }
        } else {
          multiply_queries(scores[t], words, head, pair);
        }
      }
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
          if constexpr (Kind::kSoftcap) score = args.softcap * kLog2E * tanhf(score);
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

  __device__ __forceinline__ void multiply_values(const Scores& weights, uint32_t tile) {
    const int lane = lane_index();
#pragma unroll
    for (int t = 0; t < kTokenSteps; ++t) {
      uint32_t b[kGroups][2];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float (&four)[4] = weights[t][g];
        b[g][0] = transposed(pack<Operand>(four[0], four[1]));
        b[g][1] = transposed(pack<Operand>(four[2], four[3]));
      }
#pragma unroll
      for (int i = 0; i < kHeads * kUnitPairs; ++i) {
        const int head = i / kUnitPairs, pair = i % kUnitPairs;
        // The lane's matrix. Float8: tokens 0-7 and 8-15 of the first unit, then of the second.
        // Otherwise: both units of tokens 0-7, then of tokens 8-15.
        const int half = kFloat8 ? lane / 8 % 2 : lane / 16;
        const int unit = kFloat8 ? lane / 16 : lane / 8 % 2;
        uint32_t words[4];
        load_matrices_transposed(
            words, tile + (16 * t + 8 * half + lane % 8) * kSpan + unit_offset(2 * i + unit));
        if constexpr (kFloat8) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            // Two columns of two tokens: ordered by token, then by column.
            const uint32_t low = __byte_perm(words[2 * k], 0, 0x3120);
            const uint32_t high = __byte_perm(words[2 * k + 1], 0, 0x3120);
            const uint32_t a[4] = {e4m3_to_float16(low), e4m3_to_float16(low >> 16),
                                   e4m3_to_float16(high), e4m3_to_float16(high >> 16)};
            multiply_weights(head, 2 * pair + k, a, b);
          }
        } else {
          multiply_weights(head, pair, words, b);
        }
      }
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
