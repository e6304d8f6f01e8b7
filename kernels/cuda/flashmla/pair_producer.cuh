// The producer warp of flashmla/pair: publishes segments, and loads queries and keys.
#pragma once

#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/cache_policy.cuh>

#include "pair_tile.cuh"

namespace kernelcat {

// Runs in one warp of each thread block.
template <typename Tile>
struct PairProducer {
  PairShared<Tile>& shared;
  const TensorMap &map_q, &map_kv;
  const int* block_table;
  int heads, table_width, num_slots, rank;

  // The first column of a chunk, in a row of the queries or of the cache.
  __device__ __forceinline__ int column(int chunk) const {
    return chunk == Tile::kRopeChunk ? kLatent
                                     : (rank * Tile::kValueChunks + chunk) * Tile::kColumns;
  }

  // The first slot of the lane's box of a KV tile. A box beyond the sequence begins beyond the end
  // of the cache, where TMA loads zeros.
  __device__ __forceinline__ int slot_of(const Segment& segment, int tile) const {
    const int token = tile * Tile::BLOCK_N + lane_index() % Tile::kBoxes * Tile::kBoxTokens;
    if (token >= segment.sequence.num_tokens) return num_slots;
    const int64_t entry =
        static_cast<int64_t>(segment.sequence_idx) * table_width + token / Tile::kPageSize;
    return __ldg(block_table + entry) * Tile::kPageSize + token % Tile::kPageSize;
  }

  // Each lane loads a box.
  __device__ __forceinline__ void load_keys(int stage, int slot) const {
    Barrier& full = shared.keys_full[stage];
    if (lane_index() == 0) full.arrive_expect(Tile::kChunks * Tile::kChunkBytes);
    __syncwarp();
    const int chunk = lane_index() / Tile::kBoxes, box = lane_index() % Tile::kBoxes;
    if (chunk < Tile::kChunks) {
      uint8_t* target = shared.keys[stage][chunk] + box * Tile::kBoxTokens * kRowBytes;
      tensor_load(target, map_kv, column(chunk), slot, full, evict_first_policy());
    }
    __syncwarp();
  }

  // Passes segment number `index` to the consumers, and loads its queries.
  __device__ __forceinline__ void publish(const Segment& segment, int index) const {
    shared.queries_empty.wait(index & 1 ^ 1);
    Barrier& full = shared.queries_full;
    const int row = segment.sequence.first_query * heads + segment.first_row;
    if (lane_index() == 0) {
      shared.segments[index & 1] = segment;
      full.arrive_expect((Tile::kWarpgroups * Tile::kValueChunks + 1) * Tile::kChunkBytes);
    }
    __syncwarp();
    const int warpgroup = lane_index() / Tile::kValueChunks;
    const int chunk = lane_index() % Tile::kValueChunks;
    if (warpgroup < Tile::kWarpgroups) {
      tensor_load(shared.queries[warpgroup][chunk], map_q, column(chunk),
                  row + warpgroup * Tile::kWarpgroupRows, full, kDefaultPolicy);
    } else if (lane_index() == Tile::kWarpgroups * Tile::kValueChunks) {
      tensor_load(shared.queries_rope, map_q, column(Tile::kRopeChunk),
                  row + rank * Tile::kWarpgroupRows, full, kDefaultPolicy);
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
    __syncwarp();
  }

  __device__ __forceinline__ void run(const LatentSchedule<Tile>& schedule,
                                      const WorkCursor<typename Tile::List>& cursor) const {
    int segment_idx = 0;
    PipelineState<Tile::kNumStages> at;
    schedule.for_each(cursor, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin);
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        const int next = tile + 1 < segment.end ? slot_of(segment, tile + 1) : num_slots;
        shared.keys_empty[at.stage].wait(at.phase ^ 1);
        load_keys(at.stage, slot);
        at.advance();
        if (tile == segment.begin) publish(segment, segment_idx++);
        slot = next;
      }
    });
    publish_end(segment_idx);
  }
};

}  // namespace kernelcat
