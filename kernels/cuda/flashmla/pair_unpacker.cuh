// The producer warpgroup of flashmla/pair with packed rows: its first warp publishes segments, and
// loads queries and packed rows; all four warps convert latents from float8 to 16 bits.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/fp8_to_fp16.cuh>

#include "pair_producer.cuh"

namespace kernelcat {

constexpr int kUnpackBarrier = 6;

// Whether the phase has completed, without waiting.
__device__ __forceinline__ bool has_completed(const Barrier& barrier, uint32_t phase) {
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

// The 256 latents of a token that a thread block has are two groups of 128 bytes with a scale each.
// TMA loads both to where the 16-bit values of the first group will be, so a stage needs no more
// memory.
template <typename Tile>
struct PairUnpacker {
  using T = typename Tile::T;
  using Position = PipelineState<Tile::kNumStages>;
  static constexpr int kGroups = kLatent / Tile::kTeamBlocks / kScaleGroup;
  static constexpr int kGroupChunks = Tile::kValueChunks / kGroups;
  static constexpr int kGroupBytes = Tile::BLOCK_N * kScaleGroup;
  static constexpr int kUnits = kGroupBytes / 16 / kWarpgroupThreads;  // of a group, for a thread
  static constexpr int kLoadedBytes =
      Tile::BLOCK_N * (kLatent / Tile::kTeamBlocks + PackedRow::kBytes - PackedRow::kScalesAt);
  static_assert(kGroups == 2 && kGroupChunks == 2);

  PairProducer<Tile> producer;  // its map_kv is over the latents
  const TensorMap &map_rope, &map_scales;

  // A lane loads a box: of a group of latents, of the rotated part, or of scales.
  __device__ __forceinline__ void load(int stage, int slot) const {
    PairShared<Tile>& shared = producer.shared;
    Barrier& full = shared.packed_full[stage];
    if (lane_index() == 0) full.arrive_expect(kLoadedBytes);
    __syncwarp();
    const int part = lane_index() / Tile::kBoxes;
    const int token = lane_index() % Tile::kBoxes * Tile::kBoxTokens;
    const uint64_t policy = evict_first_policy();
    if (part < kGroups) {
      uint8_t* target = shared.keys[stage][0] + part * kGroupBytes + token * kScaleGroup;
      const int column = (producer.rank * kGroups + part) * kScaleGroup;
      tensor_load(target, producer.map_kv, column, slot, full, policy);
    } else if (part == kGroups) {
      uint8_t* target = shared.keys[stage][Tile::kRopeChunk] + token * kRowBytes;
      tensor_load(target, map_rope, PackedRow::kRopeAt, slot, full, policy);
    } else if (part == kGroups + 1) {
      tensor_load(&shared.scales[stage][token], map_scales, PackedRow::kScalesAt, slot, full,
                  policy);
    }
    __syncwarp();
  }

  static __device__ __forceinline__ int unit_of(int i) {
    return threadIdx.x % kWarpgroupThreads + i * kWarpgroupThreads;
  }

  // Converts 16 latents of a token, and stores them in the swizzle that wgmma reads.
  __device__ __forceinline__ void unpack(int stage, int group, int unit, const uint4& bytes) const {
    PairShared<Tile>& shared = producer.shared;
    const int token = unit / (kScaleGroup / 16), piece = unit % (kScaleGroup / 16);
    const float4 scales = shared.scales[stage][token];
    const float* scale_of = reinterpret_cast<const float*>(&scales);
    const float scale = producer.rank == 0 ? scale_of[group] : scale_of[kGroups + group];
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    uint4 halves[2];
    uint32_t* pairs = reinterpret_cast<uint32_t*>(halves);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t pair = e4m3_to_float16(words[i / 2] >> i % 2 * 16);
      const float low = to_float(__builtin_bit_cast(float16, static_cast<uint16_t>(pair)));
      const float high = to_float(__builtin_bit_cast(float16, static_cast<uint16_t>(pair >> 16)));
      pairs[i] = pack<T>(low * scale, high * scale);
    }
    constexpr int kPieces = Tile::kColumns / 16;  // of a chunk
    uint8_t* chunk = shared.keys[stage][group * kGroupChunks + piece / kPieces];
    // Lanes with pieces of both chunks store at the same time; they write to different banks if
    // those of the second chunk begin with the second half.
    const bool swaps = piece >= kPieces;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int half = swaps ? 1 - i : i;
      const int target = token * kRowBytes + (piece % kPieces * 2 + half) * 16;
      *reinterpret_cast<uint4*>(chunk + swizzled<kRowBytes>(target)) =
          swaps ? halves[1 - i] : halves[i];
    }
  }

  // Converts a stage. The values of the second group lie behind the packed bytes; those of the
  // first group overwrite the bytes of both groups, which all threads must have read.
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

  // Loads run as far ahead as stages are empty; only the next KV tile's stage is waited for.
  __device__ __forceinline__ void run(const LatentSchedule<Tile>& schedule,
                                      const WorkCursor<typename Tile::List>& cursor) const {
    PairShared<Tile>& shared = producer.shared;
    const bool loads = warp_index() % 4 == 0;
    int segment_idx = 0;
    Position at, ahead;
    schedule.for_each(cursor, [&](const Segment& segment) {
      int loaded = segment.begin;  // loads of the tiles before this one have started
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        while (loads && loaded < segment.end) {
          const Barrier& empty = shared.keys_empty[ahead.stage];
          const uint32_t phase = ahead.phase ^ 1;
          if (loaded > tile && !__all_sync(0xffffffff, has_completed(empty, phase))) break;
          shared.keys_empty[ahead.stage].wait(phase);
          load(ahead.stage, producer.slot_of(segment, loaded++));
          ahead.advance();
        }
        if (loads && tile == segment.begin) producer.publish(segment, segment_idx);
        unpack(at);
        at.advance();
      }
      ++segment_idx;
    });
    if (loads) producer.publish_end(segment_idx);
  }
};

}  // namespace kernelcat
