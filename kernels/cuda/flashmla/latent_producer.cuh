// The producer warp of flashmla/wgmma: publishes segments, and loads queries and keys.
#pragma once

#include <kernelcat/cache_policy.cuh>
#include <kernelcat/cluster.cuh>

#include "latent_tile.cuh"

namespace kernelcat {

// Runs in one warp.
template <typename Tile>
struct LatentProducer {
  LatentShared<Tile>& shared;
  const TensorMap &map_q, &map_kv;
  const int* block_table;
  int heads, table_width, num_slots, rank;

  // The first box of a KV tile that this thread block loads for its cluster.
  __device__ __forceinline__ int first_box() const {
    return rank % Tile::kClusterSize * Tile::kBoxes;
  }

  // The first slot of the lane's box of a KV tile. A box beyond the sequence begins beyond the end
  // of the cache, where TMA loads zeros.
  __device__ __forceinline__ int slot_of(const Segment& segment, int tile) const {
    const int box = first_box() + lane_index();
    const int token = tile * Tile::BLOCK_N + box * Tile::kBoxTokens;
    if (lane_index() >= Tile::kBoxes || token >= segment.sequence.num_tokens) return num_slots;
    const int64_t entry =
        static_cast<int64_t>(segment.sequence_idx) * table_width + token / Tile::kPageSize;
    return __ldg(block_table + entry) * Tile::kPageSize + token % Tile::kPageSize;
  }

  // Passes segment number `index` to the consumers, and loads its queries once the queries before
  // have been multiplied by their last keys; the rotated part, which lies in the first tile of
  // weights, once those weights have been read.
  __device__ __forceinline__ void publish(const Segment& segment, int index) const {
    const int row = segment.sequence.first_query * heads + segment.first_row;
    shared.queries_empty.wait(index & 1 ^ 1);
    if (lane_index() == 0) {
      shared.segments[index & 1] = segment;
      shared.queries_full.arrive_expect(Tile::kChunks * Tile::kChunkBytes);
      for (int chunk = 0; chunk < Tile::kValueChunks; ++chunk) {
        tensor_load(shared.queries[chunk], map_q, chunk * Tile::kColumns, row, shared.queries_full,
                    kDefaultPolicy);
      }
    }
    __syncwarp();
    shared.queries_rope_empty.wait(index & 1 ^ 1);
    if (lane_index() == 0) {
      tensor_load(shared.weights[0], map_q, kLatent, row, shared.queries_full, kDefaultPolicy);
    }
    __syncwarp();
  }

  // Keeps keys in L2 where other clusters of the team read the same tokens.
  static __device__ __forceinline__ uint64_t policy() {
    return Tile::kClusterSize < Tile::kTeamBlocks ? kDefaultPolicy : evict_first_policy();
  }

  __device__ __forceinline__ void load_piece(int stage, int piece, int slot) const {
    const int lane = lane_index(), chunks = piece == 0 ? 1 : Tile::kPieceChunks;
    Barrier& full = shared.keys_full[stage][piece];
    if (lane == 0) full.arrive_expect(chunks * Tile::kChunkBytes);
    __syncwarp();
    if (lane >= Tile::kBoxes) return;
    for (int i = 0; i < chunks; ++i) {
      const int chunk = piece == 0 ? Tile::kValueChunks : Tile::chunk(stage, piece, i);
      const int box = first_box() + lane;
      uint8_t* target = shared.keys[stage][chunk] + box * Tile::kBoxTokens * kRowBytes;
      if constexpr (Tile::kClusterSize == 1) {
        tensor_load(target, map_kv, chunk * Tile::kColumns, slot, full, policy());
      } else {
        tensor_load_multicast(target, map_kv, chunk * Tile::kColumns, slot, full,
                              (1 << Tile::kClusterSize) - 1, policy());
      }
    }
  }

  // `phase` is that of the stage's full barriers.
  __device__ __forceinline__ void load_keys(int stage, uint32_t phase, int slot) const {
    shared.rope_empty[stage].wait(phase ^ 1);
    load_piece(stage, 0, slot);
#pragma unroll 1
    for (int piece = 1; piece < Tile::kPieces; ++piece) {
      // Stage s begins with half s of the columns, which is released first.
      const int half = (piece - 1) * Tile::kPieceChunks / Tile::kHalfChunks ^ stage;
      shared.half_empty[stage][half].wait(phase ^ 1);
      load_piece(stage, piece, slot);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void publish_end(int index) const {
    shared.queries_empty.wait(index & 1 ^ 1);
    if (lane_index() == 0) {
      Segment& none = shared.segments[index & 1];
      none.begin = none.end = 0;
      shared.queries_full.arrive();
    }
  }

  __device__ __forceinline__ void run(const LatentSchedule<Tile>& schedule,
                                      const WorkCursor<typename Tile::List>& cursor) const {
    int segment_idx = 0;
    StagePhases phases;
    schedule.for_each(cursor, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin);
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        const int stage = (tile - segment.begin) % 2;
        const int next = tile + 1 < segment.end ? slot_of(segment, tile + 1) : num_slots;
        const bool begins = tile == segment.begin;
        if (begins && segment_idx == 0)
          publish(segment, 0);  // queries do not wait for the block table
        load_keys(stage, phases.of(stage), slot);
        phases.flip(stage);
        if (begins && segment_idx++ > 0) publish(segment, segment_idx - 1);
        slot = next;
      }
    });
    publish_end(segment_idx);
  }
};

}  // namespace kernelcat
