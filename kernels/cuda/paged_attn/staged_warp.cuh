// What a warp of paged_attn/staged does with a KV tile: copies it into a stage of its own by
// cp.async, whole rows at a time, and multiplies from there as paged_attn/tma does.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/mbarrier.cuh>

#include "decode_warp.cuh"
#include "lane_slots.cuh"

namespace kernelcat {

template <typename Kind, int kRowTiles, int kTokens>
struct StagedWarp : DecodeWarp<Kind, 1, kRowTiles, kTokens> {
  using Base = DecodeWarp<Kind, 1, kRowTiles, kTokens>;
  using State = typename Base::State;
  using Base::kSpan, Base::kTileBytes, Base::kTokenBytes, Base::kUnits;
  using typename Base::Scores;
  static constexpr int kLaneTokens = ceil_div(kTokens, kWarpThreads);  // that a lane looks up
  static constexpr int kStageBytes = 2 * kTileBytes;                   // keys, then values
  static constexpr int kStageAlignment = 128;
  static constexpr bool kQueriesFirst = true, kSharesMerge = true;
  static constexpr int kRowUnits = kTokenBytes / 16;            // 16-byte units of a key
  static constexpr int kCopyTokens = kWarpThreads / kRowUnits;  // that the warp copies at a time
  static constexpr int kCopies = kTokens / kCopyTokens;
  static constexpr int kUnroll = kCopies > 16 ? 8 : kCopies;  // addresses that registers hold
  static_assert(kCopyTokens * kRowUnits == kWarpThreads && kCopies * kCopyTokens == kTokens);

  // Starts the copies of a tile into `stage`: first the keys, then the values. The first
  // `num_visible` tokens are visible; others have keys and values of zero. `slots` are as in
  // lane_slots.cuh.
  __device__ __forceinline__ void load(const AttentionArgs<Kind>& args, int kv_head,
                                       const int (&slots)[kLaneTokens], int num_visible,
                                       uint8_t* stage) const {
    const int lane_token = lane_index() / kRowUnits, unit = lane_index() % kRowUnits;
    const int64_t first_byte = static_cast<int64_t>(kv_head) * Kind::kRowBytes + unit * 16;
    const uint32_t token_bytes = args.kv_heads * Kind::kRowBytes;
    const uint32_t target = unit_offset(lane_token, unit);
    int visible_slots[kLaneTokens];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) visible_slots[i] = max(slots[i], 0);
    const auto find = [&](int i) { return slot_of(visible_slots, i * kCopyTokens, lane_token); };
    int found[kCopies];  // once for keys and values, if registers hold them
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if constexpr (kUnroll == kCopies) found[i] = find(i);
    }
    __syncwarp();  // all lanes have read what the stage held
    const auto copy = [&](uint32_t tile, const void* cache) {
      const uint8_t* first = static_cast<const uint8_t*>(cache) + first_byte;
#pragma unroll kUnroll
      for (int i = 0; i < kCopies; ++i) {
        const uint32_t slot = kUnroll == kCopies ? found[i] : find(i);
        // A copy's first token has its bits of the swizzle above the lane's.
        const uint32_t offset = target ^ swizzle(i * kCopyTokens) * 16;
        async_copy_16(tile + offset + i * kCopyTokens * kSpan,
                      first + static_cast<uint64_t>(slot) * token_bytes,
                      i * kCopyTokens + lane_token < num_visible);
      }
      commit_async_copies();
    };
    copy(shared_address(stage), args.k_cache);
    copy(shared_address(stage) + kTileBytes, args.v_cache);
  }

  // Adds the tile that was loaded: tokens `token` .. of the sequence. `is_masked` says whether some
  // row does not see some of them. Scores are computed while values are still on their way.
  __device__ __forceinline__ void attend(int token, bool is_masked, const AttentionArgs<Kind>& args,
                                         uint8_t* stage) {
    const uint32_t keys = shared_address(stage);
    Scores scores = {};
    wait_async_copies<1>();
    __syncwarp();  // for the copies of all lanes
    Base::multiply_keys(scores, keys);
    State::scale_scores(scores, args);
    if (is_masked) State::mask_scores(scores, token, args.window);
    State::exponentiate(scores);
    wait_async_copies<0>();
    __syncwarp();
    Base::multiply_values(scores, keys + kTileBytes);
  }

 private:
  // What the numbers of a token's units are XORed with, as DecodeWarp::unit_offset() has it.
  static __device__ __forceinline__ constexpr int swizzle(int token) {
    return token % 8 / (8 / kUnits) % kUnits;
  }
  // Offset of a 16-byte unit of a token's row in a tile.
  static __device__ __forceinline__ uint32_t unit_offset(int token, int unit) {
    return unit / kUnits * (kTokens * kSpan) + token * kSpan +
           (unit % kUnits ^ swizzle(token)) * 16;
  }
};

}  // namespace kernelcat
