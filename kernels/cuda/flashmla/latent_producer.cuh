// What the producer warp of flashmla/wgmma does: it tells segments, and loads queries and keys.
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

  // Of those that the block loads for its cluster.
  __device__ __forceinline__ int first_box() const {
    return rank % Tile::kClusterSize * Tile::kBoxes;
  }

  // Where in the cache the lane's box of a tile begins: beyond its end, which makes zeros, where
  // the sequence has no tokens.
  __device__ __forceinline__ int slot_of(const Segment& segment, int tile) const {
    const int box = first_box() + lane_index();
    const int token = tile * Tile::BLOCK_N + box * Tile::kBoxTokens;
    if (lane_index() >= Tile::kBoxes || token >= segment.sequence.num_tokens) return num_slots;
    const int64_t entry =
        static_cast<int64_t>(segment.index) * table_width + token / Tile::kPageSize;
    return __ldg(block_table + entry) * Tile::kPageSize + token % Tile::kPageSize;
  }

  // The consumers' next segment, number `index`, and its queries, as soon as the last keys have
  // been multiplied by those before; their rotated part when no more weights are there.
  __device__ __forceinline__ void tell(const Segment& segment, int index) const {
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

  // Blocks of other clusters read the same tokens, or nobody does.
  static __device__ __forceinline__ uint64_t policy() {
    return Tile::kClusterSize < Tile::kSide ? kDefaultPolicy : evict_first_policy();
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
      uint8_t* place = shared.keys[stage][chunk] + box * Tile::kBoxTokens * kRowBytes;
      if constexpr (Tile::kClusterSize == 1) {
        tensor_load(place, map_kv, chunk * Tile::kColumns, slot, full, policy());
      } else {
        tensor_load_multicast(place, map_kv, chunk * Tile::kColumns, slot, full,
                              (1 << Tile::kClusterSize) - 1, policy());
      }
    }
  }

  // `phase` of the stage's earlier loads.
  __device__ __forceinline__ void load_keys(int stage, uint32_t phase, int slot) const {
    shared.rope_empty[stage].wait(phase ^ 1);
    load_piece(stage, 0, slot);
#pragma unroll 1
    for (int piece = 1; piece < Tile::kPieces; ++piece) {
      // A stage's own half first, which is given back first.
      const int half = (piece - 1) * Tile::kPieceChunks / Tile::kHalfChunks ^ stage;
      shared.half_empty[stage][half].wait(phase ^ 1);
      load_piece(stage, piece, slot);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void tell_end(int index) const {
    shared.queries_empty.wait(index & 1 ^ 1);
    if (lane_index() == 0) {
      Segment& none = shared.segments[index & 1];
      none.begin = none.end = 0;
      shared.queries_full.arrive();
    }
  }

  __device__ __forceinline__ void run(const LatentSchedule<Tile>& schedule,
                                      const Cursor<typename Tile::List>& cursor) const {
    int index = 0;        // of the segment
    uint32_t phases = 0;  // bit s: of stage s
    schedule.for_each(cursor, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin);
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        const int stage = (tile - segment.begin) % 2;
        const int next = tile + 1 < segment.end ? slot_of(segment, tile + 1) : num_slots;
        const bool tells = tile == segment.begin;
        if (tells && index == 0) tell(segment, 0);  // queries need no look at the block table
        load_keys(stage, phases >> stage & 1, slot);
        phases ^= 1 << stage;
        if (tells && index++ > 0) tell(segment, index - 1);
        slot = next;
      }
    });
    tell_end(index);
  }
};

}  // namespace kernelcat
