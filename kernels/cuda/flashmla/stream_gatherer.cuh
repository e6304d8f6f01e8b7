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

  __device__ __forceinline__ void load(Keys& keys, int slot) const {
    constexpr int kSlotBytes = Keys::kChunks * kSpan + Keys::kTailBytes;
    const bool has_slot = slot != kNoSlot;
    const auto* source = reinterpret_cast<const uint8_t*>(args.kv_cache) +
                         static_cast<int64_t>(max(slot, 0)) * kSlotBytes;
#pragma unroll
    for (int chunk = 0; chunk < Keys::kChunks; ++chunk) {
      gather_span(keys.chunks[chunk], gather_row(), source + chunk * kSpan, has_slot);
    }
    const uint8_t* tail = source + Keys::kChunks * kSpan;
    if constexpr (Keys::kPacked) {
      const uint32_t target = shared_address(keys.tail) + gather_row() * Keys::kTailPitch;
      for (int at = gather_unit() * 16; at < Keys::kTailBytes; at += kGatherLanes * 16) {
        async_copy_16(target + at, tail + at, has_slot);
      }
    } else {
      gather_span(keys.tail, gather_row(), tail, has_slot);
    }
  }

  __device__ __forceinline__ void produce(const LatentSchedule<Tile>& schedule,
                                          const WorkCursor<typename Tile::List>& first) const {
    PipelineState<Tile::kNumStages> at;
    schedule.for_each(first, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin);
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        const int next = slot_of(segment, tile + 1);
        shared.empty[at.stage].wait(at.phase ^ 1);
        load(shared.keys[at.stage], slot);
        arrive_when_gathered(shared.full[at.stage]);
        at.advance();
        slot = next;
      }
    });
  }
};

}  // namespace kernelcat
