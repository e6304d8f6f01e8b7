// KV tiles of 16 tokens in shared memory, and the score warps of flashmla/mma. All products are
// transposed: the tokens, then the columns of the values, are mma.sync's 16 rows, and the query
// rows are its 8 columns.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/fp8_to_fp16.cuh>
#include <kernelcat/fragments.cuh>
#include <kernelcat/load_transposed.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/widen.cuh>

#include "latent.cuh"
#include "segments.cuh"

namespace kernelcat {

constexpr int kTileTokens = 16;
constexpr int kSpan = 128;      // bytes of a row in a chunk
constexpr int kScoreWarps = 4;  // each takes every fourth KV tile
constexpr int kValueWarps = 4;  // each accumulates a quarter of the columns
constexpr int kWarpColumns = kLatent / kValueWarps;
constexpr int kWeightPitch = 24;  // floats: lanes access different banks
static_assert(kWarpColumns == kScaleGroup, "a warp's columns of a token share a scale");

// A KV tile in shared memory, and the operand types of its products.
template <typename T, typename Cached>
struct KvTile16 {
  using Key = T;    // operands of the scores
  using Value = T;  // operands of the output
  static constexpr bool kPacked = false;
  static constexpr int kChunks = kLatent * 2 / kSpan;
  static constexpr int kTailBytes = kRope * 2;  // the rotated part, swizzled as chunks are
  static constexpr int kTailPitch = kSpan;
  alignas(1024) uint8_t chunks[kChunks][kTileTokens * kSpan];
  alignas(1024) uint8_t tail[kTileTokens * kTailPitch];
};

// Float8 keys become float16, by one instruction per pair; queries are divided by powers of two so
// that they fit. Weights are multiplied by the scales of values, for which only bfloat16 has the
// range.
template <typename T>
struct KvTile16<T, PackedRow> {
  using Key = float16;
  using Value = bfloat16;
  static constexpr bool kPacked = true;
  static constexpr int kChunks = kLatent / kSpan;
  static constexpr int kTailBytes =
      PackedRow::kBytes - PackedRow::kScalesAt;  // scales, rotated part
  static constexpr int kTailPitch = kTailBytes;  // 9 * 16 bytes: rows lie in different banks
  alignas(1024) uint8_t chunks[kChunks][kTileTokens * kSpan];
  alignas(1024) uint8_t tail[kTileTokens * kTailPitch];

  __device__ __forceinline__ const float* scales(int token) const {
    return reinterpret_cast<const float*>(tail + token * kTailPitch);
  }
};

// What a score warp publishes the value warps of a unit.
template <int kGroups>
struct TileWeights {
  float weights[8 * kGroups][kWeightPitch];  // relative to row_max
  float row_max[8 * kGroups];                // in base 2
};

// Offset of a 16-byte unit in the lane's row of a chunk, with the swizzle; lane l has row l % 8.
__device__ __forceinline__ uint32_t swizzled_unit(int unit) {
  return (unit ^ lane_index() % 8) * 16;
}

// One of the warps that compute scores of 8 * kGroups rows. Lane l has, of every 8 rows, the scores
// of rows 2 * (l % 4) + {0, 1} and of tokens l / 4 and l / 4 + 8.
template <typename T, typename Cached, int kGroups>
struct ScoreWarp {
  using Keys = KvTile16<T, Cached>;
  static constexpr bool kPacked = Keys::kPacked;
  static constexpr int kSteps = kLatent / 16, kRopeSteps = kRope / 16;
  using Scores = float[kGroups][4];

  uint32_t queries[kGroups][kSteps][2], rope[kGroups][kRopeSteps][2];
  float row_max[kGroups][2];
  float latent_factor[kPacked ? kGroups : 1][2];  // of the latents' part of scores
  float scale;                                    // of scores
  int last_visible[kGroups][2];                   // the last token that a row sees

  __device__ __forceinline__ void begin(const LatentArgs<T, Cached>& args, const Segment& segment) {
    scale = args.sm_scale * kLog2E;
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        last_visible[r][j] = segment.last_visible(8 * r + lane_index() % 4 * 2 + j, args.heads);
        row_max[r][j] = -kInfinity;
      }
    }
  }

  // Takes the queries from a stage, in which they lie as the tokens of a KV tile do. Rows beyond
  // the segment's are those of other sequences, and their results are not stored.
  __device__ __forceinline__ void take_queries(const Keys& stage) {
    // Lane l passes the address of row l % 8 of matrix l / 8. Two groups of rows: both halves of a
    // step, of each. One group: both halves of two steps.
    constexpr int kStepsAtOnce = 2 / kGroups;
    const int lane = lane_index(), matrix = lane / 8;
    const int row = kGroups == 2 ? lane % 8 + matrix / 2 * 8 : lane % 8;
    const int unit = kGroups == 2 ? matrix % 2 : matrix;
    const uint32_t first = shared_address(stage.chunks) + row * kSpan;
#pragma unroll
    for (int step = 0; step < kSteps + kRopeSteps; step += kStepsAtOnce) {
      const uint32_t chunk = first + step / 4 * (kTileTokens * kSpan);
      uint32_t matrices[4];
      load_matrices(matrices, chunk + swizzled_unit(2 * (step % 4) + unit));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = kGroups == 2 ? i : 0, at = kGroups == 2 ? step : step + i;
        auto& words = at < kSteps ? queries[r][at] : rope[r][at - kSteps];
        words[0] = matrices[2 * i], words[1] = matrices[2 * i + 1];
      }
    }
    fence_async_shared();  // before TMA writes there again
  }

  // Loads the queries of packed keys; rows beyond the segment's are zero.
  __device__ __forceinline__ void load_queries(const LatentArgs<T, Cached>& args,
                                               const Segment& segment) {
    const int lane = lane_index();
    const int64_t first =
        static_cast<int64_t>(segment.sequence.first_query) * args.heads + segment.first_row;
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      const int row = 8 * r + lane / 4;
      const T* query = args.q + (first + row) * kRowElements;
      const bool is_inside = row < segment.num_rows;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint2 words = {};  // four neighbours, as multiply_packed() has the keys
        if (is_inside) words = *reinterpret_cast<const uint2*>(query + 16 * step + lane % 4 * 4);
        queries[r][step][0] = words.x, queries[r][step][1] = words.y;
      }
#pragma unroll
      for (int step = 0; step < kRopeSteps; ++step) {
        const uint2 words = is_inside ? two_pairs(query + kLatent + 16 * step) : uint2{};
        rope[r][step][0] = words.x, rope[r][step][1] = words.y;
      }
      const float query_factor = scale * scale_to_float16(queries[r]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        latent_factor[r][j] = __shfl_sync(0xffffffff, query_factor, 4 * (lane % 4 * 2 + j));
      }
    }
  }

  // Zeroes tokens `first` .. of the KV tile: slots that hold no token of the sequence may hold NaN,
  // which a weight of zero does not remove.
  static __device__ __forceinline__ void clear(Keys& keys, int first) {
    for (int i = lane_index(); i < Keys::kChunks * kTileTokens * (kSpan / 16); i += kWarpThreads) {
      if (i / (kSpan / 16) % kTileTokens >= first) reinterpret_cast<uint4*>(keys.chunks)[i] = {};
    }
    constexpr int kUnits = Keys::kTailPitch / 16;
    for (int i = lane_index(); i < kTileTokens * kUnits; i += kWarpThreads) {
      if (i / kUnits >= first) reinterpret_cast<uint4*>(keys.tail)[i] = {};
    }
    fence_async_shared();  // TMA writes there next
    __syncwarp();
  }

  // Computes the weights of tokens `token` .. of the sequence.
  __device__ __forceinline__ void attend(const Keys& keys, int token,
                                         TileWeights<kGroups>& tile_weights) {
    Scores scores = {};
    if constexpr (kPacked) {
      multiply_packed(scores, keys);
    } else {
      multiply(scores, keys);
    }
    mask_scores(scores, token);
    exponentiate(scores);
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        tile_weights.weights[8 * r + lane % 4 * 2 + j % 2][lane / 4 + j / 2 * 8] = scores[r][j];
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (lane < 4) tile_weights.row_max[8 * r + lane * 2 + j] = row_max[r][j];
      }
    }
  }

 private:
  static __device__ __forceinline__ uint2 two_pairs(const T* query) {
    const T* pair = query + lane_index() % 4 * 2;
    return {*reinterpret_cast<const uint32_t*>(pair), *reinterpret_cast<const uint32_t*>(pair + 8)};
  }

  template <typename Operand, int kCount>
  static __device__ __forceinline__ void add(Scores& scores, const uint32_t (&a)[4],
                                             const uint32_t (&b)[kGroups][kCount][2], int step) {
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
      mma_16x8x16<Operand>(scores[r], a, b[r][step][0], b[r][step][1]);
    }
  }

  // Two accumulators in turn, because each product waits for the one before it in its accumulator.
  __device__ __forceinline__ void multiply(Scores& scores, const Keys& keys) const {
    const int lane = lane_index();
    const uint32_t first = shared_address(keys.chunks) + lane % 16 * kSpan;
    const uint32_t last = shared_address(keys.tail) + lane % 16 * kSpan;
    Scores odd = {};
#pragma unroll
    for (int step = 0; step < kSteps + kRopeSteps; ++step) {
      const uint32_t chunk = step < kSteps ? first + step / 4 * (kTileTokens * kSpan) : last;
      uint32_t a[4];
      load_matrices(a, chunk + swizzled_unit(2 * (step % 4) + lane / 16));
      Scores& accumulator = step % 2 ? odd : scores;
      if (step < kSteps) {
        add<T>(accumulator, a, queries, step);
      } else {
        add<T>(accumulator, a, rope, step - kSteps);
      }
    }
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[r][j] = (scores[r][j] + odd[r][j]) * scale;
    }
  }

  // The scores of packed rows, whose groups of latents have a scale each.
  __device__ __forceinline__ void multiply_packed(Scores& scores, const Keys& keys) const {
    const int lane = lane_index();
    const float4 upper = *reinterpret_cast<const float4*>(keys.scales(lane / 4));
    const float4 lower = *reinterpret_cast<const float4*>(keys.scales(lane / 4 + 8));
    const float scales[2][4] = {{upper.x, upper.y, upper.z, upper.w},
                                {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
    for (int group = 0; group < Keys::kChunks; ++group) {
      const uint32_t chunk = shared_address(keys.chunks[group]) + lane % 16 * kSpan;
      Scores sum = {};
#pragma unroll
      for (int pair = 0; pair < kSpan / 32; ++pair) {
        uint32_t words[4];  // tokens 0-7 and 8-15 of 16 columns, then of the next
        load_matrices(words, chunk + swizzled_unit(2 * pair + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t a[4] = {e4m3_to_float16(words[2 * i]), e4m3_to_float16(words[2 * i + 1]),
                                 e4m3_to_float16(words[2 * i] >> 16),
                                 e4m3_to_float16(words[2 * i + 1] >> 16)};
          add<float16>(sum, a, queries, group * (kSpan / 16) + 2 * pair + i);
        }
      }
#pragma unroll
      for (int r = 0; r < kGroups; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[r][j] += sum[r][j] * scales[j / 2][group];
      }
    }
    const uint32_t tail = shared_address(keys.tail) + lane % 16 * Keys::kTailPitch;
    Scores sum = {};
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      uint32_t a[4];
      load_matrices(a,
                    tail + PackedRow::kRopeAt - PackedRow::kScalesAt + (2 * step + lane / 16) * 16);
      add<T>(sum, a, rope, step);
    }
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[r][j] = scores[r][j] * latent_factor[r][j % 2] + sum[r][j] * scale;
      }
    }
  }

  __device__ __forceinline__ void mask_scores(Scores& scores, int token) const {
    const int lane_token = token + lane_index() / 4;
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (lane_token + j / 2 * 8 > last_visible[r][j % 2]) scores[r][j] = -kInfinity;
      }
    }
  }

  // Replaces scores by weights relative to the row max of the warp's KV tiles.
  __device__ __forceinline__ void exponentiate(Scores& scores) {
    float tile_max[kGroups][2];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        tile_max[r][j] = fmaxf(scores[r][j], scores[r][j + 2]);
        grows |= tile_max[r][j] > row_max[r][j];
      }
    }
    if (__any_sync(0xffffffff, grows)) {
#pragma unroll
      for (int r = 0; r < kGroups; ++r) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int step = 4; step < kWarpThreads; step *= 2) {
            tile_max[r][j] =
                fmaxf(tile_max[r][j], __shfl_xor_sync(0xffffffff, tile_max[r][j], step));
          }
          row_max[r][j] = fmaxf(row_max[r][j], tile_max[r][j]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kGroups; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float base = row_max[r][j % 2] == -kInfinity ? 0.0f : row_max[r][j % 2];
        scores[r][j] = fast_exp2(scores[r][j] - base);
      }
    }
  }
};

}  // namespace kernelcat
