// What the producer warpgroup of flashmla/pair does with float8 rows: its first warp tells
// segments, and loads queries and rows as they are cached; all four make 16-bit numbers of them.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/fp8_to_fp16.cuh>

#include "pair_producer.cuh"

namespace kernelcat {

constexpr int kUnpackBarrier = 6;

// Whether the phase of this phase is over; nobody waits.
__device__ __forceinline__ bool is_over(const Barrier& barrier, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(phase)
      : "memory");
  return done != 0;
}

// The block's 256 latents of a token are two groups with a scale each, of 128 bytes. They land
// where the first half of their numbers will be, so that a stage needs no more room.
template <typename Tile>
struct PairUnpacker {
  using T = typename Tile::T;
  using Position = PipelineState<Tile::kNumStages>;
  static constexpr int kGroups = kLatent / Tile::kSide / kScaleGroup;
  static constexpr int kGroupChunks = Tile::kValueChunks / kGroups;
  static constexpr int kGroupBytes = Tile::BLOCK_N * kScaleGroup;
  static constexpr int kUnits = kGroupBytes / 16 / kWarpgroupThreads;  // of a group, for a thread
  static constexpr int kLoadedBytes =
      Tile::BLOCK_N * (kLatent / Tile::kSide + PackedRow::kBytes - PackedRow::kScalesAt);
  static_assert(kGroups == 2 && kGroupChunks == 2);

  PairProducer<Tile> producer;  // its map_kv has the latents
  const TensorMap &map_rope, &map_scales;

  // A lane loads a box: of a group, of the rotated part, or of scales.
  __device__ __forceinline__ void load(int stage, int slot) const {
    PairShared<Tile>& shared = producer.shared;
    Barrier& full = shared.packed_full[stage];
    if (lane_index() == 0) full.arrive_expect(kLoadedBytes);
    __syncwarp();
    const int what = lane_index() / Tile::kBoxes;
    const int token = lane_index() % Tile::kBoxes * Tile::kBoxTokens;
    const uint64_t policy = evict_first_policy();
    if (what < kGroups) {
      uint8_t* place = shared.keys[stage][0] + what * kGroupBytes + token * kScaleGroup;
      const int column = (producer.rank * kGroups + what) * kScaleGroup;
      tensor_load(place, producer.map_kv, column, slot, full, policy);
    } else if (what == kGroups) {
      uint8_t* place = shared.keys[stage][Tile::kRopeChunk] + token * kRowBytes;
      tensor_load(place, map_rope, PackedRow::kRopeAt, slot, full, policy);
    } else if (what == kGroups + 1) {
      tensor_load(&shared.scales[stage][token], map_scales, PackedRow::kScalesAt, slot, full,
                  policy);
    }
    __syncwarp();
  }

  static __device__ __forceinline__ int unit_of(int i) {
    return threadIdx.x % kWarpgroupThreads + i * kWarpgroupThreads;
  }

  // 16 numbers of a token, in the swizzle that wgmma reads.
  __device__ __forceinline__ void unpack(int stage, int group, int unit, const uint4& bytes) const {
    PairShared<Tile>& shared = producer.shared;
    const int token = unit / (kScaleGroup / 16), piece = unit % (kScaleGroup / 16);
    const float4 scales = shared.scales[stage][token];
    const float* scale_of = reinterpret_cast<const float*>(&scales);
    const float scale = producer.rank == 0 ? scale_of[group] : scale_of[kGroups + group];
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    uint4 halves[2];
    uint32_t* numbers = reinterpret_cast<uint32_t*>(halves);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair = e4m3_to_float16(words[i / 2] >> i % 2 * 16);
      const float low = to_float(__builtin_bit_cast(float16, static_cast<uint16_t>(pair)));
      const float high = to_float(__builtin_bit_cast(float16, static_cast<uint16_t>(pair >> 16)));
      numbers[i] = pack<T>(low * scale, high * scale);
    }
    constexpr int kPieces = Tile::kColumns / 16;  // of a chunk
    uint8_t* chunk = shared.keys[stage][group * kGroupChunks + piece / kPieces];
    // Lanes of both chunks store at a time: in different banks, if one's second half comes first.
    const bool swaps = piece >= kPieces;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int half = swaps ? 1 - i : i;
      const int place = token * kRowBytes + (piece % kPieces * 2 + half) * 16;
      *reinterpret_cast<uint4*>(chunk + swizzled<kRowBytes>(place)) =
          swaps ? halves[1 - i] : halves[i];
    }
  }

  // The second group's numbers lie beyond all bytes; the first one's lie where both groups' bytes
  // are, which all threads must have read.
  __device__ __forceinline__ void unpack(const Position& at) const {
    PairShared<Tile>& shared = producer.shared;
    shared.packed_full[at.stage].wait(at.phase);
    const uint4* bytes = reinterpret_cast<const uint4*>(shared.keys[at.stage][0]);
    uint4 first[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) first[i] = bytes[unit_of(i)];
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i) {
      unpack(at.stage, 1, unit_of(i), bytes[kGroupBytes / 16 + unit_of(i)]);
    }
    named_barrier_sync(kUnpackBarrier, kWarpgroupThreads);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) unpack(at.stage, 0, unit_of(i), first[i]);
    fence_async_shared();  // wgmma reads it
    shared.keys_full[at.stage].arrive();
  }

  // Loads are as far ahead as stages are free; only the next tile's is waited for.
  __device__ __forceinline__ void run(const LatentSchedule<Tile>& schedule,
                                      const Cursor<typename Tile::List>& cursor) const {
    PairShared<Tile>& shared = producer.shared;
    const bool loads = warp_index() % 4 == 0;
    int index = 0;  // of the segment
    Position at, ahead;
    schedule.for_each(cursor, [&](const Segment& segment) {
      int loaded = segment.begin;  // tiles before this one are on their way
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        while (loads && loaded < segment.end) {
          const Barrier& empty = shared.keys_empty[ahead.stage];
          const uint32_t phase = ahead.phase ^ 1;
          if (loaded > tile && !__all_sync(0xffffffff, is_over(empty, phase))) break;
          shared.keys_empty[ahead.stage].wait(phase);
          load(ahead.stage, producer.slot_of(segment, loaded++));
          ahead.advance();
        }
        if (loads && tile == segment.begin) producer.tell(segment, index);
        unpack(at);
        at.advance();
      }
      ++index;
    });
    if (loads) producer.tell_end(index);
  }
};

}  // namespace kernelcat
