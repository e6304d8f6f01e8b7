// The producer warpgroup of flashmla/wgmma with pages of one token: its first warp publishes
// segments and loads queries, all four gather keys.
#pragma once

#include "gathered_rows.cuh"
#include "latent_producer.cuh"

namespace kernelcat {

template <typename Tile>
struct LatentGatherer {
  static constexpr int kRows = Tile::BLOCK_N / kGatherRows;  // of a KV tile, for a thread
  static_assert(Tile::kPageSize == 1 && Tile::kClusterSize == 1);

  LatentProducer<Tile> producer;
  const typename Tile::T* kv_cache;  // (slots, 576)

  __device__ __forceinline__ void look_up(int (&slots)[kRows], const Segment& segment,
                                          int tile) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = tile * Tile::BLOCK_N + i * kGatherRows + gather_row();
      slots[i] = gather_slot(producer.block_table, producer.table_width, segment, token);
    }
  }

  __device__ __forceinline__ void load_piece(int stage, int piece,
                                             const int (&slots)[kRows]) const {
    const int chunks = piece == 0 ? 1 : Tile::kPieceChunks;
    for (int i = 0; i < chunks; ++i) {
      const int chunk = piece == 0 ? Tile::kValueChunks : Tile::chunk(stage, piece, i);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int64_t first = static_cast<int64_t>(max(slots[j], 0)) * kRowElements;
        const auto* source =
            reinterpret_cast<const uint8_t*>(kv_cache + first + chunk * Tile::kColumns);
        gather_span(producer.shared.keys[stage][chunk], j * kGatherRows + gather_row(), source,
                    slots[j] != kNoSlot);
      }
    }
    arrive_when_gathered(producer.shared.keys_full[stage][piece]);
  }

  // `phase` is that of the stage's full barriers.
  __device__ __forceinline__ void load_keys(int stage, uint32_t phase,
                                            const int (&slots)[kRows]) const {
    producer.shared.rope_empty[stage].wait(phase ^ 1);
    load_piece(stage, 0, slots);
#pragma unroll 1
    for (int piece = 1; piece < Tile::kPieces; ++piece) {
      const int half = (piece - 1) * Tile::kPieceChunks / Tile::kHalfChunks ^ stage;
      producer.shared.half_empty[stage][half].wait(phase ^ 1);
      load_piece(stage, piece, slots);
    }
  }

  __device__ __forceinline__ void run(const LatentSchedule<Tile>& schedule,
                                      const WorkCursor<typename Tile::List>& cursor) const {
    const bool publishes = warp_index() % 4 == 0;
    int segment_idx = 0;
    StagePhases phases;
    schedule.for_each(cursor, [&](const Segment& segment) {
      int slots[kRows];
      look_up(slots, segment, segment.begin);
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        const int stage = (tile - segment.begin) % 2;
        int next[kRows];
        look_up(next, segment, tile + 1);
        load_keys(stage, phases.of(stage), slots);
        phases.flip(stage);
        if (tile == segment.begin && publishes) producer.publish(segment, segment_idx);
#pragma unroll
        for (int i = 0; i < kRows; ++i) slots[i] = next[i];
      }
      ++segment_idx;
    });
    if (publishes) producer.publish_end(segment_idx);
  }
};

}  // namespace kernelcat
