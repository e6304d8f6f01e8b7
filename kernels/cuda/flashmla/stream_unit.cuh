// What flashmla/mma does with 16 tokens: scores, weights and sums, all transposed. The tokens, and
// then the columns of values, are mma.sync's 16 rows, the queries its 8 columns.
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

constexpr int kUnitTokens = 16;
constexpr int kSpan = 128;      // bytes of a row in a chunk
constexpr int kScoreWarps = 4;  // each takes every fourth unit
constexpr int kValueWarps = 4;  // each sums a quarter of the columns
constexpr int kWarpColumns = kLatent / kValueWarps;
constexpr int kWeightPitch = 24;  // floats: so that lanes meet no bank twice
static_assert(kWarpColumns == kScaleGroup, "a warp's columns of a token share a scale");

// A unit in shared memory, and what its products take.
template <typename T, typename Cached>
struct Unit {
  using Key = T;    // of scores' operands
  using Value = T;  // of sums' operands
  static constexpr bool kPacked = false;
  static constexpr int kChunks = kLatent * 2 / kSpan;
  static constexpr int kTailBytes = kRope * 2;  // the rotated part, swizzled as chunks are
  static constexpr int kTailPitch = kSpan;
  alignas(1024) uint8_t chunks[kChunks][kUnitTokens * kSpan];
  alignas(1024) uint8_t tail[kUnitTokens * kTailPitch];
};

// Float8 keys become float16, by one instruction a pair; queries are divided by powers of two so
// that they fit. Weights are multiplied by values' scales, for which only bfloat16 has room.
template <typename T>
struct Unit<T, PackedRow> {
  using Key = float16;
  using Value = bfloat16;
  static constexpr bool kPacked = true;
  static constexpr int kChunks = kLatent / kSpan;
  static constexpr int kTailBytes =
      PackedRow::kBytes - PackedRow::kScalesAt;  // scales, rotated part
  static constexpr int kTailPitch = kTailBytes;  // nine times 16: rows lie in different banks
  alignas(1024) uint8_t chunks[kChunks][kUnitTokens * kSpan];
  alignas(1024) uint8_t tail[kUnitTokens * kTailPitch];

  __device__ __forceinline__ const float* scales(int token) const {
    return reinterpret_cast<const float*>(tail + token * kTailPitch);
  }
};

// What a score warp tells the value warps of a unit.
template <int kRowTiles>
struct UnitWeights {
  float weights[8 * kRowTiles][kWeightPitch];  // relative to `most`
  float most[8 * kRowTiles];                   // in base 2
};

// Matrices of eight tokens x 16 bytes: where lane l's row lies in a chunk, but for the tokens.
__device__ __forceinline__ uint32_t swizzled_unit(int unit) {
  return (unit ^ lane_index() % 8) * 16;
}

// Lane l has, of tokens l / 4 and l / 4 + 8, the scores of rows 2 * (l % 4) and the next, of every
// 8 rows.
template <typename T, typename Cached, int kRowTiles>
struct ScoreWarp {
  using Keys = Unit<T, Cached>;
  static constexpr bool kPacked = Keys::kPacked;
  static constexpr int kSteps = kLatent / 16, kRopeSteps = kRope / 16;
  using Scores = float[kRowTiles][4];

  uint32_t queries[kRowTiles][kSteps][2], rope[kRowTiles][kRopeSteps][2];
  float most[kRowTiles][2];
  float factor[kPacked ? kRowTiles : 1][2];  // of scores of latents
  float scale;                               // of scores
  int limit[kRowTiles][2];                   // the last token that a row sees

  // Loads the queries; rows beyond the segment's are zero.
  __device__ __forceinline__ void begin(const LatentAttention<T, Cached>& call,
                                        const Segment& segment) {
    const int lane = lane_index();
    const int64_t first =
        static_cast<int64_t>(segment.sequence.first_query) * call.heads + segment.first_row;
    scale = call.sm_scale * kLog2E;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const int row = 8 * r + lane / 4;
      const T* query = call.q + (first + row) * kRowElements;
      const bool is_live = row < segment.num_rows;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint2 words = {};
        if constexpr (kPacked) {  // as multiply_packed() has keys: a lane's four neighbours
          if (is_live) words = *reinterpret_cast<const uint2*>(query + 16 * step + lane % 4 * 4);
        } else {
          if (is_live) words = two_pairs(query + 16 * step);
        }
        queries[r][step][0] = words.x, queries[r][step][1] = words.y;
      }
#pragma unroll
      for (int step = 0; step < kRopeSteps; ++step) {
        const uint2 words = is_live ? two_pairs(query + kLatent + 16 * step) : uint2{};
        rope[r][step][0] = words.x, rope[r][step][1] = words.y;
      }
      float grown = scale;
      if constexpr (kPacked) grown *= scale_to_float16(queries[r]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int own = lane % 4 * 2 + j;  // of the rows of scores, not of queries
        if constexpr (kPacked) factor[r][j] = __shfl_sync(0xffffffff, grown, 4 * own);
        limit[r][j] = segment.limit(8 * r + own, call.heads);
        most[r][j] = -kInfinity;
      }
    }
  }

  // Slots from token `first` of the unit on may hold NaN, which weights of zero do not undo.
  static __device__ __forceinline__ void clear(Keys& keys, int first) {
    for (int i = lane_index(); i < Keys::kChunks * kUnitTokens * (kSpan / 16); i += kWarpThreads) {
      if (i / (kSpan / 16) % kUnitTokens >= first) reinterpret_cast<uint4*>(keys.chunks)[i] = {};
    }
    constexpr int kUnits = Keys::kTailPitch / 16;
    for (int i = lane_index(); i < kUnitTokens * kUnits; i += kWarpThreads) {
      if (i / kUnits >= first) reinterpret_cast<uint4*>(keys.tail)[i] = {};
    }
    fence_async_shared();  // TMA writes there next
    __syncwarp();
  }

  // Tokens `token` .. of the sequence.
  __device__ __forceinline__ void attend(const Keys& keys, int token,
                                         UnitWeights<kRowTiles>& told) {
    Scores scores = {};
    if constexpr (kPacked) {
      multiply_packed(scores, keys);
    } else {
      multiply(scores, keys);
    }
    hide(scores, token);
    exponentiate(scores);
    const int lane = lane_index();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        told.weights[8 * r + lane % 4 * 2 + j % 2][lane / 4 + j / 2 * 8] = scores[r][j];
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (lane < 4) told.most[8 * r + lane * 2 + j] = most[r][j];
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
                                             const uint32_t (&b)[kRowTiles][kCount][2], int step) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      mma_16x8x16<Operand>(scores[r], a, b[r][step][0], b[r][step][1]);
    }
  }

  // Two sums by turns, for each product waits for the one before.
  __device__ __forceinline__ void multiply(Scores& scores, const Keys& keys) const {
    const int lane = lane_index();
    const uint32_t first = shared_address(keys.chunks) + lane % 16 * kSpan;
    const uint32_t last = shared_address(keys.tail) + lane % 16 * kSpan;
    Scores odd = {};
#pragma unroll
    for (int step = 0; step < kSteps + kRopeSteps; ++step) {
      const uint32_t chunk = step < kSteps ? first + step / 4 * (kUnitTokens * kSpan) : last;
      uint32_t a[4];
      load_matrices(a, chunk + swizzled_unit(2 * (step % 4) + lane / 16));
      Scores& sum = step % 2 ? odd : scores;
      if (step < kSteps) {
        add<T>(sum, a, queries, step);
      } else {
        add<T>(sum, a, rope, step - kSteps);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[r][j] = (scores[r][j] + odd[r][j]) * scale;
    }
  }

  // Each group of latents has a scale of its own.
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
      for (int r = 0; r < kRowTiles; ++r) {
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
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[r][j] = scores[r][j] * factor[r][j % 2] + sum[r][j] * scale;
      }
    }
  }

  __device__ __forceinline__ void hide(Scores& scores, int token) const {
    const int own = token + lane_index() / 4;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (own + j / 2 * 8 > limit[r][j % 2]) scores[r][j] = -kInfinity;
      }
    }
  }

  // Scores become weights relative to the largest that the warp has seen.
  __device__ __forceinline__ void exponentiate(Scores& scores) {
    float largest[kRowTiles][2];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        largest[r][j] = fmaxf(scores[r][j], scores[r][j + 2]);
        grows |= largest[r][j] > most[r][j];
      }
    }
    if (__any_sync(0xffffffff, grows)) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int step = 4; step < kWarpThreads; step *= 2) {
            largest[r][j] = fmaxf(largest[r][j], __shfl_xor_sync(0xffffffff, largest[r][j], step));
          }
          most[r][j] = fmaxf(most[r][j], largest[r][j]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float base = most[r][j % 2] == -kInfinity ? 0.0f : most[r][j % 2];
        scores[r][j] = fast_exp2(scores[r][j] - base);
      }
    }
  }
};

}  // namespace kernelcat
