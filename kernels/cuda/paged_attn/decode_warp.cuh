// What a warp of paged_attn/tma and of paged_attn/staged does with a KV tile in shared memory:
// scores, online softmax, and the product with the values.
#pragma once

#include <kernelcat/load_transposed.cuh>
#include <kernelcat/sync.cuh>

#include "decode_rows.cuh"

namespace kernelcat {

template <typename Kind, int kHeads, int kRowTiles, int kTokens>
struct DecodeWarp : DecodeRowState<Kind, kHeads, kRowTiles, kTokens> {
  using State = DecodeRowState<Kind, kHeads, kRowTiles, kTokens>;
  using State::kFloat8, State::kGroups, State::kHeadDim, State::kSteps, State::kTokenSteps;
  using typename State::Scores, typename State::T;
  // A KV tile lies as chunks of kSpan bytes of every token.
  static constexpr int kTokenBytes = kHeads * Kind::kRowBytes;
  static constexpr int kSpan = kTokenBytes < 128 ? kTokenBytes : 128;
  static constexpr int kChunks = kTokenBytes / kSpan;
  static constexpr int kChunkColumns = kHeads * kHeadDim / kChunks;
  static constexpr int kTileBytes = kTokens * kTokenBytes;  // of keys, and of values
  static constexpr int kUnits = kSpan / 16;                 // 16-byte units in a chunk's row
  static constexpr int kUnitPairs = Kind::kRowBytes / 32;   // pairs of units of a head

  // The column of a head that accumulators[step][..][2 * half + {0, 1}] belong to.
  static __device__ __forceinline__ int column(int step, int half) {
    const int row = lane_index() / 4;  // of mma.sync's
    return 16 * step + (kFloat8 ? 2 * row + half : row + 8 * half);
  }

  // Loads the queries and clears the accumulators (DecodeRowState).
  __device__ __forceinline__ void begin(const AttentionArgs<Kind>& args,
                                        const TileRows<Kind>& first, int num_rows,
                                        const Sequence& sequence) {
    const auto load = [](uint32_t (&words)[kSteps][2], const T* query) {
      const int lane = lane_index();
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
    };
    State::begin(args, first, num_rows, sequence, load);
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
    Scores scores = {};
    multiply_keys(scores, stage);
    State::scale_scores(scores, args);
    if (is_masked) State::mask_scores(scores, token, args.window);
    State::exponentiate(scores);
    multiply_values(scores, stage + kTileBytes);
  }

 protected:
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
            State::multiply_queries(scores[t], a, head, 2 * pair + unit);
          }
        } else {
          State::multiply_queries(scores[t], words, head, pair);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const Scores& weights, uint32_t tile) {
    const int lane = lane_index();
#pragma unroll
    for (int t = 0; t < kTokenSteps; ++t) {
      uint32_t b[kGroups][2];
      State::weight_operands(b, weights[t]);
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
            State::multiply_weights(head, 2 * pair + k, a, b);
          }
        } else {
          State::multiply_weights(head, pair, words, b);
        }
      }
    }
  }
};

}  // namespace kernelcat
