// What a warp of paged_attn/registers does with a KV tile: loads it into registers, in the layout
// in which mma.sync takes it, and computes scores, online softmax, and the product with the values.
//
// Products sum over head_dim, or over tokens, in any order that both operands share, and rows of a
// product may stand for any columns of the values. So lanes load whole units of 16 bytes. Scores:
// of every 64 bytes of a key, lane l has unit l % 4, which is the lane's part of two steps of 16
// elements; its part of the queries is the same unit. Output: of every 128 bytes of a value, lane l
// has unit l / 4 of four tokens, whose eight columns are rows of mma.sync, in pairs.
#pragma once

#include "decode_rows.cuh"
#include "lane_slots.cuh"

namespace kernelcat {

template <typename Kind, int kRowTiles, int kTokens>
struct RegisterWarp : DecodeRowState<Kind, 1, kRowTiles, kTokens> {
  using State = DecodeRowState<Kind, 1, kRowTiles, kTokens>;
  using State::kGroups, State::kSteps, State::kTokenSteps;
  using typename State::Scores, typename State::T;
  static constexpr int kUnitBytes = 16;
  static constexpr int kKeyUnits = Kind::kRowBytes / (4 * kUnitBytes);    // of a key, of a lane
  static constexpr int kValueUnits = Kind::kRowBytes / (8 * kUnitBytes);  // of a value, of a lane
  static constexpr int kLaneTokens = ceil_div(kTokens, kWarpThreads);     // that a lane looks up
  static constexpr int kStageBytes = 0, kStageAlignment = 16;
  static constexpr bool kQueriesFirst = false, kSharesMerge = false;
  static_assert(sizeof(typename Kind::Cached) == 2 && kSteps == 2 * kKeyUnits);

  // Of every 16 tokens: keys of tokens l / 4 and l / 4 + 8, values of tokens 2 * (l % 4) + {0, 1,
  // 8, 9}; of every unit four words.
  uint32_t keys[kTokenSteps][2][kKeyUnits][4];
  uint32_t values[kTokenSteps][4][kValueUnits][4];

  // The column of a head that accumulators[step][..][2 * half + {0, 1}] belong to.
  static __device__ __forceinline__ int column(int step, int half) {
    return 64 * (step / 4) + 8 * (lane_index() / 4) + 2 * (step % 4) + half;
  }

  // Loads the queries and clears the accumulators (DecodeRowState).
  __device__ __forceinline__ void begin(const AttentionArgs<Kind>& args, const TileRows<Kind>& rows,
                                        int num_rows, const Sequence& sequence) {
    const auto load = [](uint32_t (&words)[kSteps][2], const T* query) {
      const uint4* units = reinterpret_cast<const uint4*>(query) + lane_index() % 4;
#pragma unroll
      for (int i = 0; i < kKeyUnits; ++i) {
        const uint4 unit = units[4 * i];
        words[2 * i][0] = unit.x, words[2 * i][1] = unit.y;
        words[2 * i + 1][0] = unit.z, words[2 * i + 1][1] = unit.w;
      }
    };
    State::begin(args, rows, num_rows, sequence, load);
  }

  // Starts the loads of a tile; invisible tokens have keys and values of zero. `slots` are those of
  // tokens l, l + 32 .. of the tile, in lane l.
  __device__ __forceinline__ void load(const AttentionArgs<Kind>& args, int kv_head,
                                       const int (&slots)[kLaneTokens], int /* num_visible */,
                                       uint8_t* /* stage */) {
    const int lane = lane_index();
    const int64_t first_row = static_cast<int64_t>(kv_head) * Kind::kRowBytes;
    const uint32_t token_bytes = args.kv_heads * Kind::kRowBytes;
    const uint8_t* key_rows = reinterpret_cast<const uint8_t*>(args.k_cache) + first_row;
    const uint8_t* value_rows = reinterpret_cast<const uint8_t*>(args.v_cache) + first_row;
#pragma unroll
    for (int t = 0; t < kTokenSteps; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = slot_of(slots, 16 * t, 8 * half + lane / 4);
        load_units<4>(keys[t][half], key_rows, slot, token_bytes, lane % 4);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokenSteps; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int slot = slot_of(slots, 16 * t, i / 2 * 8 + lane % 4 * 2 + i % 2);
        load_units<8>(values[t][i], value_rows, slot, token_bytes, lane / 4);
      }
    }
  }

  // Adds the tile that was loaded: tokens `token` .. of the sequence. `is_masked` says whether some
  // row does not see some of them.
  __device__ __forceinline__ void attend(int token, bool is_masked, const AttentionArgs<Kind>& args,
                                         uint8_t* /* stage */) {
    Scores scores = {};
    multiply_keys(scores);
    State::scale_scores(scores, args);
    if (is_masked) State::mask_scores(scores, token, args.window);
    State::exponentiate(scores);
    multiply_values(scores);
  }

 private:
  // Units unit, unit + kStep .. of the row of a slot.
  template <int kStep, int kUnits>
  static __device__ __forceinline__ void load_units(uint32_t (&words)[kUnits][4],
                                                    const uint8_t* rows, int slot,
                                                    uint32_t token_bytes, int unit) {
    const uint64_t offset = static_cast<uint64_t>(static_cast<uint32_t>(slot)) * token_bytes;
    const uint4* row = reinterpret_cast<const uint4*>(rows + offset) + unit;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      uint4 four = {};
      if (slot != kInvisible) four = row[kStep * i];
      words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
    }
  }

  __device__ __forceinline__ void multiply_keys(Scores& scores) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int unit = i / 2, word = i % 2 * 2;
#pragma unroll
      for (int t = 0; t < kTokenSteps; ++t) {
        const uint32_t (&low)[4] = keys[t][0][unit], (&high)[4] = keys[t][1][unit];
        const uint32_t a[4] = {low[word], high[word], low[word + 1], high[word + 1]};
        State::multiply_queries(scores[t], a, 0, i);
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const Scores& weights) {
#pragma unroll
    for (int t = 0; t < kTokenSteps; ++t) {
      uint32_t b[kGroups][2];
      State::weight_operands(b, weights[t]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // Two columns of two tokens each become two tokens of a column each.
        const auto word = [&](int token) { return values[t][token][step / 4][step % 4]; };
        const uint32_t a[4] = {
            __byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
            __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
        State::multiply_weights(0, step, a, b);
      }
    }
  }
};

}  // namespace kernelcat
