// What the producer warpgroup of flashmla/mma does over pages of one token.
#pragma once

#include "gathered_rows.cuh"
#include "stream_unit.cuh"

namespace kernelcat {

template <typename Tile, typename Shared>
struct StreamGatherer {
  using Keys = typename Tile::Keys;
  static_assert(kUnitTokens == kGatherRows);

  Shared& shared;
  const LatentAttention<typename Tile::T, typename Tile::Cached>& call;

  __device__ __forceinline__ int slot_of(const Segment& segment, int unit) const {
    const int token = unit * kUnitTokens + gather_row();
    return gather_slot(call.block_table, call.table_width, segment, token);
  }

  __device__ __forceinline__ void load(Keys& keys, int slot) const {
    constexpr int kSlotBytes = Keys::kChunks * kSpan + Keys::kTailBytes;
    const bool has_slot = slot != kNoSlot;
    const auto* source = reinterpret_cast<const uint8_t*>(call.kv_cache) +
                         static_cast<int64_t>(max(slot, 0)) * kSlotBytes;
#pragma unroll
    for (int chunk = 0; chunk < Keys::kChunks; ++chunk) {
      gather_span(keys.chunks[chunk], gather_row(), source + chunk * kSpan, has_slot);
    }
    const uint8_t* tail = source + Keys::kChunks * kSpan;
    if constexpr (Keys::kPacked) {
      const uint32_t place = shared_address(keys.tail) + gather_row() * Keys::kTailPitch;
      for (int at = gather_unit() * 16; at < Keys::kTailBytes; at += kGatherLanes * 16) {
        async_copy_16(place + at, tail + at, has_slot);
      }
    } else {
      gather_span(keys.tail, gather_row(), tail, has_slot);
    }
  }

  __device__ __forceinline__ void produce(const LatentSchedule<Tile>& schedule,
                                          const Cursor<typename Tile::List>& first) const {
    PipelineState<Tile::kNumStages> at;
    schedule.for_each(first, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin);
      for (int unit = segment.begin; unit < segment.end; ++unit) {
        const int next = slot_of(segment, unit + 1);
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
