// What the producer warp of paged_attn/wgmma does: it looks for the row tiles, and loads queries,
// keys and values by TMA.
#pragma once

#include <kernelcat/cluster.cuh>

#include "prefill_schedule.cuh"
#include "tensor_load.cuh"

namespace kernelcat {

template <typename Tile>
struct PrefillProducer {
  using State = PipelineState<Tile::kNumStages>;
  using Chunks = uint8_t[Tile::kChunks][Tile::BLOCK_N * kRowBytes];

  PrefillShared<Tile>& shared;
  const TensorMap &map_q, &map_k, &map_v;
  const int* block_table;  // (batch, table_width)
  int table_width;
  int num_slots;  // of the cache
  int group, rank;

  // The first slot of the lane's box of a KV tile. A box of which the sequence has no token begins
  // beyond the end of the cache, where TMA loads zeros.
  __device__ __forceinline__ int slot_of(const RowTile& rows, int tile) const {
    const int box = rank * Tile::kBoxes + lane_index();
    const int token = tile * Tile::BLOCK_N + box * Tile::kBoxTokens;
    if (lane_index() >= Tile::kBoxes || token >= rows.sequence.num_tokens) return num_slots;
    const int64_t entry =
        static_cast<int64_t>(rows.sequence_idx) * table_width + token / Tile::kPageSize;
    return __ldg(block_table + entry) * Tile::kPageSize + token % Tile::kPageSize;
  }

  __device__ __forceinline__ void load_queries(const RowTile& rows, uint32_t phase) const {
    shared.queries_empty.wait(phase ^ 1);
    if (lane_index() == 0) {
      shared.row_tiles[phase] = rows;
      shared.queries_full.arrive_expect(Tile::BLOCK_M / group * group * kRowBytes * Tile::kChunks);
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        tensor_load_4d(shared.queries[chunk], map_q, chunk * Tile::kChunkColumns, 0, rows.kv_head,
                       rows.sequence.first_query + rows.first_query, shared.queries_full);
      }
    }
    __syncwarp();
  }

  // Loads the thread block's boxes of a KV tile, for all thread blocks of the cluster.
  __device__ __forceinline__ void load(Chunks& stage, const TensorMap& map, Barrier& empty,
                                       Barrier& full, State& state, int kv_head, int slot) const {
    empty.wait(state.phase ^ 1);
    const int lane = lane_index();
    if (lane == 0) full.arrive_expect(Tile::kTileBytes);
    __syncwarp();
    if (lane < Tile::kBoxes) {
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        uint8_t* box = stage[chunk] + (rank * Tile::kBoxes + lane) * Tile::kBoxTokens * kRowBytes;
        const int column = chunk * Tile::kChunkColumns;
        if constexpr (Tile::kClusterSize == 1) {
          tensor_load_3d(box, map, column, kv_head, slot, full);
        } else {
          tensor_load_multicast_3d(box, map, column, kv_head, slot, full,
                                   (1 << Tile::kClusterSize) - 1);
        }
      }
    }
    __syncwarp();
    state.advance();
  }

  __device__ __forceinline__ void load_keys(State& state, const RowTile& rows, int slot) const {
    load(shared.keys[state.stage], map_k, shared.keys_empty[state.stage],
         shared.keys_full[state.stage], state, rows.kv_head, slot);
  }
  __device__ __forceinline__ void load_values(State& state, const RowTile& rows, int slot) const {
    load(shared.values[state.stage], map_v, shared.values_empty[state.stage],
         shared.values_full[state.stage], state, rows.kv_head, slot);
  }

  // KV tiles come from the last to the first. Values follow the keys one tile behind, as they are
  // consumed.
  __device__ __forceinline__ void run(PrefillSchedule<Tile> schedule) const {
    State keys, values;
    PipelineState<1> queries;
    RowTile rows;
    while (schedule.next(rows)) {
      int slot = slot_of(rows, rows.end - 1);
      load_keys(keys, rows, slot);
      load_queries(rows, queries.phase);
      queries.advance();
      for (int tile = rows.end - 2; tile >= rows.begin; --tile) {
        const int next = slot_of(rows, tile);
        load_keys(keys, rows, next);
        load_values(values, rows, slot);
        slot = next;
      }
      load_values(values, rows, slot);
    }
    shared.queries_empty.wait(queries.phase ^ 1);
    if (lane_index() == 0) {
      shared.row_tiles[queries.phase] = RowTile::none();
      shared.queries_full.arrive();
    }
  }
};

}  // namespace kernelcat
