// The producer warpgroup of flashmla/mma with pages of one token.
#pragma once

#include "gathered_rows.cuh"
#include "kv_tile16.cuh"

namespace kernelcat {

template <typename Tile, typename Shared>
struct StreamGatherer {
  using Keys = typename Tile::Keys;
  static_assert(kTileTokens == kGatherRows);

  Shared& shared;
  const LatentArgs<typename Tile::T, typename Tile::Cached>& args;

  __device__ __forceinline__ int slot_of(const Segment& segment, int tile) const {
    const int token = tile * kTileTokens + gather_row();
    return gather_slot(args.block_table, args.table_width, segment, token);
  }

  // Copies the thread's part of row number gather_row(), which begins at `source`.
  __device__ __forceinline__ void load(Keys& keys, const void* source, bool has_row) const {
    const auto* bytes = static_cast<const uint8_t*>(source);
#pragma unroll
    for (int chunk = 0; chunk < Keys::kChunks; ++chunk) {
      gather_span(keys.chunks[chunk], gather_row(), bytes + chunk * kSpan, has_row);
    }
    const uint8_t* tail = bytes + Keys::kChunks * kSpan;
    if constexpr (Keys::kPacked) {
      const uint32_t target = shared_address(keys.tail) + gather_row() * Keys::kTailPitch;
      for (int at = gather_unit() * 16; at < Keys::kTailBytes; at += kGatherLanes * 16) {
        async_copy_16(target + at, tail + at, has_row);
      }
    } else {
      gather_span(keys.tail, gather_row(), tail, has_row);
    }
  }

  __device__ __forceinline__ void load_slot(Keys& keys, int slot) const {
    constexpr int kSlotBytes = Keys::kChunks * kSpan + Keys::kTailBytes;
    const auto* cache = reinterpret_cast<const uint8_t*>(args.kv_cache);
    load(keys, cache + static_cast<int64_t>(max(slot, 0)) * kSlotBytes, slot != kNoSlot);
  }

  __device__ __forceinline__ void load_queries(Keys& keys, const Segment& segment) const {
    const bool has_row = gather_row() < segment.num_rows;
    const int row = segment.first_row + (has_row ? gather_row() : 0);
    const int64_t first = static_cast<int64_t>(segment.sequence.first_query) * args.heads;
    load(keys, args.q + (first + row) * kRowElements, has_row);
  }

  __device__ __forceinline__ void produce(const LatentSchedule<Tile>& schedule,
                                          const WorkCursor<typename Tile::List>& first) const {
    PipelineState<Tile::kNumStages> at;
    schedule.for_each(first, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin);
      if constexpr (!Keys::kPacked) {
        shared.empty[at.stage].wait(at.phase ^ 1);
        load_queries(shared.keys[at.stage], segment);
        arrive_when_gathered(shared.full[at.stage]);
        at.advance();
      }
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        const int next = slot_of(segment, tile + 1);
        shared.empty[at.stage].wait(at.phase ^ 1);
        load_slot(shared.keys[at.stage], slot);
        arrive_when_gathered(shared.full[at.stage]);
        at.advance();
        slot = next;
      }
    });
  }
};

}  // namespace kernelcat
