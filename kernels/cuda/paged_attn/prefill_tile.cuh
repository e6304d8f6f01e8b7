// Prefill's tiles: their shapes, their shared memory, and the order in which they are worked off.
#pragma once

#include <kernelcat/mbarrier.cuh>
#include <kernelcat/wgmma.cuh>

#include "attention.cuh"
#include "schedule.cuh"

namespace kernelcat {

// BLOCK_M rows, 64 for each consumer warpgroup, against BLOCK_N tokens at a time. Rows are query
// tokens and the heads that share a key-value head; a tile has whole tokens only.
template <typename Kind_, int BLOCK_M_, int BLOCK_N_, int kNumStages_>
struct PrefillTile {
  using Kind = Kind_;
  using T = typename Kind::T;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr int kHeadDim = Kind::kHeadDim, kPageSize = Kind::kPageSize;
  static constexpr int kNumConsumers = BLOCK_M / kWgmmaM;
  static constexpr int kConsumerThreads = kNumConsumers * kWarpgroupThreads;
  static constexpr int kNumThreads = kConsumerThreads + kWarpgroupThreads;
  static constexpr int kProducerRegisters = kNumConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kNumConsumers == 2 ? 240 : 160;
  static constexpr int kColumns = kRowBytes / 2;  // of a chunk
  static constexpr int kChunks = kHeadDim / kColumns;
  static constexpr int kTileBytes = BLOCK_N * kHeadDim * 2;
  // A box of a tensor map lies within a page.
  static constexpr int kBoxTokens = BLOCK_N < kPageSize ? BLOCK_N : kPageSize;
  static constexpr int kBoxes = BLOCK_N / kBoxTokens;
  static_assert(BLOCK_N % kBoxTokens == 0 && kPageSize % kBoxTokens == 0 && kBoxTokens % 8 == 0);
  static_assert(kBoxes <= kWarpThreads && kNumStages >= 2);
};

template <typename Tile>
struct PrefillShared {
  static constexpr int kChunks = Tile::kChunks, kNumStages = Tile::kNumStages;
  alignas(1024) uint8_t queries[kChunks][Tile::BLOCK_M * kRowBytes];
  alignas(1024) uint8_t keys[kNumStages][kChunks][Tile::BLOCK_N * kRowBytes];
  alignas(1024) uint8_t values[kNumStages][kChunks][Tile::BLOCK_N * kRowBytes];
  float totals[Tile::kConsumerThreads];  // written, never read: see keep_before()
  Barrier queries_full, queries_empty;
  Barrier keys_full[kNumStages], keys_empty[kNumStages];
  Barrier values_full[kNumStages], values_empty[kNumStages];
};

// Rows that are worked off together, and the tiles of tokens [begin, end) that some of them sees:
// at least one, so that every row is written.
struct RowTile {
  Sequence sequence;
  int index;  // of the sequence
  int kv_head;
  int first, size;  // query tokens of the sequence
  int begin, end;

  // The last tokens that the first and the last of the rows see.
  __device__ __forceinline__ int first_limit() const { return sequence.context() + first; }
  __device__ __forceinline__ int last_limit() const { return first_limit() + size - 1; }
};

// Every block takes the same number of row tiles, give or take one: those that see most first, and
// back and forth, so that the sums of what they see are alike. Made on the device, from lengths
// that a captured graph may find changed.
template <typename Tile>
struct PrefillSchedule {
  const int *kv_lens, *cu_q;
  int batch, kv_heads, group, window;
  int num_row_tiles;  // of any sequence, at most

  __device__ __forceinline__ int tokens_per_tile() const { return Tile::BLOCK_M / group; }

  template <typename Function>
  __device__ __forceinline__ void for_each(Function function) const {
    const int pairs = batch * kv_heads, total = num_row_tiles * pairs;
    const int num_blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    int place = block;
    for (int first = 0; first < total; first += num_blocks) {
      if (first + place < total) {
        const int i = first + place, pair = i % pairs;
        RowTile tile;
        if (find(tile, num_row_tiles - 1 - i / pairs, pair / kv_heads, pair % kv_heads)) {
          function(tile);
        }
      }
      place = num_blocks - 1 - place;
    }
  }

 private:
  // False if the sequence has no such tile.
  __device__ __forceinline__ bool find(RowTile& tile, int row_tile, int s, int kv_head) const {
    const int begin = __ldg(cu_q + s);
    const int first = row_tile * tokens_per_tile();
    const int num_queries = __ldg(cu_q + s + 1) - begin;
    if (first >= num_queries) return false;
    tile.sequence = {begin, num_queries, __ldg(kv_lens + s)};
    tile.index = s, tile.kv_head = kv_head, tile.first = first;
    tile.size = min(tokens_per_tile(), num_queries - first);
    const int first_token = Tile::Kind::kWindow ? max(tile.first_limit() + 1 - window, 0) : 0;
    tile.begin = first_token / Tile::BLOCK_N;
    tile.end = max(ceil_div(max(tile.last_limit() + 1, 0), Tile::BLOCK_N), tile.begin + 1);
    return true;
  }
};

}  // namespace kernelcat
