// What a warp does with a tile of tokens that TMA brought: scores, a running softmax, and the sums
// of values, all transposed: the tokens, and then the columns of values, are mma.sync's 16 rows,
// the queries its 8 columns.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/fragments.cuh>
#include <kernelcat/softmax.cuh>
#include <kernelcat/sync.cuh>

#include "float8_operands.cuh"
#include "merge.cuh"
#include "schedule.cuh"
#include "tiles.cuh"

namespace kernelcat {

// Of both products' operands. Float8 becomes float16, by one instruction a pair; queries are then
// divided by a power of two (fit_float16()) so that they fit.
template <typename Kind>
struct StreamOperand {
  using T = typename Kind::T;
};
template <typename T_, int kHeadDim, int kPageSize, bool kWindow, bool kSoftcap, bool kSinks,
          Scales kScales>
struct StreamOperand<
    AttentionKind<T_, float8_e4m3fn, kHeadDim, kPageSize, kWindow, kSoftcap, kSinks, kScales>> {
  using T = float16;
};

// Lane l has, of tokens l / 4 and l / 4 + 8 of every 16, the scores of rows 2 * (l % 4) and the
// next, of every 8 rows. Each of kHeads key-value heads, side by side in the cache, has kRowTiles
// times 8 rows.
template <typename Kind, int kHeads, int kRowTiles, int kTokens>
struct StreamTile {
  using T = typename Kind::T;
  using Operand = typename StreamOperand<Kind>::T;
  static constexpr bool kFloat8 = kIsFloat8<typename Kind::Cached>;
  static constexpr int kHeadDim = Kind::kHeadDim, kGroups = kHeads * kRowTiles;
  static constexpr int kRowBytes = kHeads * Kind::kRowBytes;       // of a token
  static constexpr int kSpan = kRowBytes < 128 ? kRowBytes : 128;  // of them, in a chunk
  static constexpr int kChunks = kRowBytes / kSpan;
  static constexpr int kColumns = kHeads * kHeadDim / kChunks;
  static constexpr int kTileBytes = kTokens * kRowBytes;
  static constexpr int kBoxTokens = kTokens < Kind::kPageSize ? kTokens : Kind::kPageSize;
  static constexpr int kBoxes = kTokens / kBoxTokens;
  static constexpr int kBlocks = kTokens / 16, kSteps = kHeadDim / 16;
  static constexpr int kUnits = kSpan / 16;                   // of 16 bytes, in a row of a chunk
  static constexpr int kPairs = Kind::kRowBytes / 32;         // of units, of a head
  static constexpr bool kScaled = kFloat8 && kIsBfloat16<T>;  // queries, by powers of two
  static_assert(kBoxTokens % 8 == 0);

  uint32_t queries[kGroups][kSteps][2];
  float sums[kSteps][kGroups][4];
  float most[kGroups][2], total[kGroups][2];  // totals: over the lane's tokens, until end()
  float factor[kGroups][2];                   // of scores
  int limit[kRowTiles][2];                    // the last token that a row sees

  // Which column of a head sums[step][..][2 * half ..] is.
  static __device__ __forceinline__ int column(int step, int half) {
    const int own = lane_index() / 4;
    return 16 * step + (kFloat8 ? 2 * own + half : own + 8 * half);
  }

  // Loads the queries; a head's rows from `num_rows` on are zero.
  __device__ __forceinline__ void begin(const Attention<Kind>& call, const TileRows<Kind>& first,
                                        int num_rows, const Sequence& sequence) {
    const int lane = lane_index(), group = call.group();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const TileRows<Kind> rows = first.of_head(g / kRowTiles);
      float scale = Kind::kSoftcap ? call.sm_scale / call.softcap : call.sm_scale * kLog2E;
      if constexpr (Kind::kScales == Scales::kHead) scale *= call.k_scale[rows.kv_head];
      const int r = g % kRowTiles, row = 8 * r + lane / 4;
      uint32_t (&words)[kSteps][2] = queries[g];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) words[step][0] = words[step][1] = 0;
      if (row < num_rows) {
        const T* query = call.q + rows.at(call, row) * kHeadDim;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if constexpr (kFloat8) {  // as multiply_keys() has them: a lane's four neighbours
            const uint2 four = *reinterpret_cast<const uint2*>(query + 16 * step + lane % 4 * 4);
            words[step][0] = four.x, words[step][1] = four.y;
          } else {
            const T* pair = query + 16 * step + lane % 4 * 2;
            words[step][0] = *reinterpret_cast<const uint32_t*>(pair);
            words[step][1] = *reinterpret_cast<const uint32_t*>(pair + 8);
          }
        }
      }
      float grown = scale;
      if constexpr (kScaled) grown *= fit_float16(words);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int own = lane % 4 * 2 + j;  // of the rows of scores, not of queries
        factor[g][j] = kScaled ? __shfl_sync(0xffffffff, grown, 4 * own) : scale;
        limit[r][j] = sequence.context() + min(8 * r + own, num_rows - 1) / group;
        most[g][j] = -kInfinity, total[g][j] = 0.0f;
      }
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[m][g][j] = 0.0f;
      }
    }
  }

  // Slots that hold no token that a query sees may hold NaN, which weights of zero do not undo.
  __device__ __forceinline__ void clear(uint8_t* stage, int token, int first_token,
                                        int end_token) const {
    for (int i = lane_index(); i < kTokens * (kRowBytes / 16); i += kWarpThreads) {
      const int at = i / kUnits % kTokens + token;
      if (at < first_token || at >= end_token) {
        reinterpret_cast<uint4*>(stage + kTileBytes)[i] = {};
      }
    }
    fence_async_shared();  // TMA writes there next
    __syncwarp();
  }

  // Tokens `token` .. of the sequence: keys, then values. `hides` says whether some row does not
  // see some of them.
  __device__ __forceinline__ void attend(uint32_t stage, int token, bool hides,
                                         const Attention<Kind>& call) {
    float scores[kBlocks][kGroups][4] = {};
    multiply_keys(scores, stage);
    scale(scores, call);
    if (hides) hide(scores, token, call.window);
    exponentiate(scores);
    multiply_values(scores, stage + kTileBytes);
  }

  // The rows' totals, in all lanes of a row.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int step = 4; step < kWarpThreads; step *= 2) {
          total[g][j] += __shfl_xor_sync(0xffffffff, total[g][j], step);
        }
      }
    }
  }

 private:
  using Scores = float[kBlocks][kGroups][4];

  // Matrices of eight tokens x one unit: where lane l's row of them lies, but for the tokens.
  static __device__ __forceinline__ uint32_t place(int unit) {
    const int mask = lane_index() % 8 / (8 / kUnits) % kUnits;
    return unit / kUnits * (kTokens * kSpan) + (unit % kUnits ^ mask) * 16;
  }

  __device__ __forceinline__ void multiply_keys(Scores& scores, uint32_t tile) const {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < kHeads * kPairs; ++i) {
      const int head = i / kPairs, pair = i % kPairs;
      const uint32_t units = tile + lane % 16 * kSpan + place(2 * i + lane / 16);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t words[4];  // tokens 0-7 and 8-15 of a unit, then of the other
        load_matrices(words, units + block * 16 * kSpan);
        if constexpr (kFloat8) {
#pragma unroll
          for (int unit = 0; unit < 2; ++unit) {
            const uint32_t a[4] = {float8_pair(words[2 * unit]), float8_pair(words[2 * unit + 1]),
                                   float8_pair(words[2 * unit] >> 16),
                                   float8_pair(words[2 * unit + 1] >> 16)};
            multiply(scores[block], a, head, 2 * pair + unit);
          }
        } else {
          multiply(scores[block], words, head, pair);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&scores)[kGroups][4], const uint32_t (&a)[4],
                                           int head, int step) const {
#pragma unroll
    for (int g = head * kRowTiles; g < (head + 1) * kRowTiles; ++g) {
      mma_16x8x16<Operand>(scores[g], a, queries[g][step][0], queries[g][step][1]);
    }
  }

  __device__ __forceinline__ void scale(Scores& scores, const Attention<Kind>& call) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& score = scores[block][g][j];
          score *= factor[g][j % 2];
          if constexpr (Kind::kSoftcap) score = call.softcap * kLog2E * tanhf(score);
        }
      }
    }
  }

  __device__ __forceinline__ void hide(Scores& scores, int token, int window) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int own = token + 16 * block + lane_index() / 4 + j / 2 * 8;
          const int ahead = own - limit[g % kRowTiles][j % 2];
          if (ahead > 0 || (Kind::kWindow && ahead <= -window)) scores[block][g][j] = -kInfinity;
        }
      }
    }
  }

  // Scores become weights. Once the largest scores have been seen, most tiles change no sum.
  __device__ __forceinline__ void exponentiate(Scores& scores) {
    float largest[kGroups][2];
    bool grows = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        largest[g][j] = fmaxf(scores[0][g][j], scores[0][g][j + 2]);
#pragma unroll
        for (int block = 1; block < kBlocks; ++block) {
          largest[g][j] = fmaxf(largest[g][j], scores[block][g][j]);
          largest[g][j] = fmaxf(largest[g][j], scores[block][g][j + 2]);
        }
        grows |= largest[g][j] > most[g][j];
      }
    }
    if (__any_sync(0xffffffff, grows)) raise(largest);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float base = most[g][j % 2] == -kInfinity ? 0.0f : most[g][j % 2];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          scores[block][g][j] = fast_exp2(scores[block][g][j] - base);
          total[g][j % 2] += scores[block][g][j];
        }
      }
    }
  }

  __device__ __forceinline__ void raise(float (&largest)[kGroups][2]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& new_most = largest[g][j];
#pragma unroll
        for (int step = 4; step < kWarpThreads; step *= 2) {
          new_most = fmaxf(new_most, __shfl_xor_sync(0xffffffff, new_most, step));
        }
        new_most = fmaxf(new_most, most[g][j]);
        const float kept = rescale_factor(most[g][j], new_most);
        most[g][j] = new_most;
        total[g][j] *= kept;
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          sums[m][g][j] *= kept;
          sums[m][g][j + 2] *= kept;
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const Scores& weights, uint32_t tile) {
    const int lane = lane_index();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t b[kGroups][2];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float (&own)[4] = weights[block][g];
        b[g][0] = transposed(pack<Operand>(own[0], own[1]));
        b[g][1] = transposed(pack<Operand>(own[2], own[3]));
      }
#pragma unroll
      for (int n = 0; n < kHeads * kPairs; ++n) {
        const int head = n / kPairs, pair = n % kPairs;
        // Of float8, both halves of the tokens of a unit, then of the other.
        const int half = kFloat8 ? lane / 8 % 2 : lane / 16;
        const int unit = kFloat8 ? lane / 16 : lane / 8 % 2;
        uint32_t words[4];
        load_matrices_transposed(
            words, tile + (16 * block + 8 * half + lane % 8) * kSpan + place(2 * n + unit));
        if constexpr (kFloat8) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            // Two columns of two tokens, token by token: column by column.
            const uint32_t low = __byte_perm(words[2 * i], 0, 0x3120);
            const uint32_t high = __byte_perm(words[2 * i + 1], 0, 0x3120);
            const uint32_t a[4] = {float8_pair(low), float8_pair(low >> 16), float8_pair(high),
                                   float8_pair(high >> 16)};
            add(head, 2 * pair + i, a, b);
          }
        } else {
          add(head, pair, words, b);
        }
      }
    }
  }

  __device__ __forceinline__ void add(int head, int step, const uint32_t (&a)[4],
                                      const uint32_t (&b)[kGroups][2]) {
#pragma unroll
    for (int g = head * kRowTiles; g < (head + 1) * kRowTiles; ++g) {
      mma_16x8x16<Operand>(sums[step][g], a, b[g][0], b[g][1]);
    }
  }
};

}  // namespace kernelcat
