// The work of a launch as one list of items, divided evenly among persistent thread blocks.
//
// An item is one row tile against one KV tile: BLOCK_M rows of a sequence and key-value head
// against BLOCK_N of its cached tokens. Rows are the query tokens, with the heads that share the
// key-value head side by side: row = query * group + head.
//
// The list runs over heads, sequences, row tiles and, innermost, KV tiles. So all row tiles of a
// thread block but the first and the last are its own from end to end, and thread blocks that work
// on the same tokens of different heads do so at the same time: short rows of several heads, or
// their scales, share a 32-byte sector. The list is made on the device because a captured graph may
// be replayed with other lengths. (After the planners of FlashMLA and FlashInfer.)
//
// Between two row tiles a thread block loses the time of several KV tiles: the sums of warps are
// merged, rows are stored, and the next queries are loaded. Where these borders are dealt out as
// well (kBorderItems), each row tile has so many items before its first KV tile that have no KV
// tile and only stand for that time. (After the fixed overhead in FlashMLA's planner.)
#pragma once

#include <kernelcat/sequences.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// The tokens that at least one row of a row tile sees, and the KV tiles [begin, end) that hold
// them: at least one, even where no row sees anything, because every row must be written.
struct KvRange {
  int first_token, end_token;
  int begin, end;

  __device__ __forceinline__ int num_tiles() const { return end - begin; }
};

// Thread block b takes items [begin(b), begin(b + 1)), at least one.
struct WorkPartition {
  int64_t num_items;
  int num_blocks;

  __device__ __forceinline__ int64_t begin(int block) const {
    return num_items * block / num_blocks;
  }
  __device__ __forceinline__ int owner(int64_t item) const {
    return static_cast<int>(((item + 1) * num_blocks - 1) / num_items);
  }
};

template <int BLOCK_M, int BLOCK_N, bool kWindow, int kBorderItems_ = 0>
struct WorkList {
  static constexpr int kBorderItems = kBorderItems_;

  const int* kv_lens;  // (batch,)
  const int* cu_q;     // (batch + 1,)
  int batch, kv_heads, group, window;

  __device__ __forceinline__ Sequence sequence(int index) const {
    return load_sequence(cu_q, kv_lens, index);
  }
  __device__ __forceinline__ int num_rows(const Sequence& sequence) const {
    return sequence.num_queries * group;
  }
  __device__ __forceinline__ int num_row_tiles(const Sequence& sequence) const {
    return ceil_div(num_rows(sequence), BLOCK_M);
  }

  __device__ __forceinline__ KvRange range(const Sequence& sequence, int row_tile) const {
    const int last_row = min((row_tile + 1) * BLOCK_M, num_rows(sequence)) - 1;
    const int end_token = max(sequence.context() + last_row / group + 1, 0);
    int first_token = 0;
    if constexpr (kWindow) {
      const int first_query = row_tile * BLOCK_M / group;
      first_token = max(sequence.context() + first_query + 1 - window, 0);
    }
    const int begin = first_token / BLOCK_N;
    return {.first_token = first_token,
            .end_token = end_token,
            .begin = begin,
            .end = max(ceil_div(end_token, BLOCK_N), begin + 1)};
  }

  // Items of a row tile.
  static __device__ __forceinline__ int num_items(const KvRange& range) {
    return kBorderItems + range.num_tiles();
  }
};

// An item of the list that has a KV tile.
template <typename List>
struct WorkCursor {
  int sequence_idx = 0, kv_head = 0, row_tile = 0;
  Sequence sequence;
  KvRange range;  // of the row tile
  int kv_tile = 0;

  __device__ __forceinline__ void next_row_tile(const List& list) {
    if (++row_tile == list.num_row_tiles(sequence)) {
      row_tile = 0;
      do {
        if (++sequence_idx == list.batch) sequence_idx = 0, ++kv_head;
        sequence = list.sequence(sequence_idx);
      } while (sequence.num_queries == 0);
    }
    range = list.range(sequence, row_tile);
    kv_tile = range.begin;
  }

  __device__ __forceinline__ void next(const List& list) {
    if (++kv_tile == range.end) next_row_tile(list);
  }
};

// The KV tiles of a thread block, counted from 0. They are looked up some tiles before they are
// worked on. From the first KV tile to its end the thread block has `num_items` items.
template <int kBorderItems>
struct BlockTiles {
  int left_ahead;     // items from the KV tile that was looked up last on; without a tile <= 0
  int left;           // items from the row tile that is worked on on
  int num_found = 0;  // KV tiles that were looked up

  __device__ __forceinline__ explicit BlockTiles(int num_items)
      : left_ahead(num_items), left(num_items) {}

  // Moves `ahead` to KV tile `tile`, which follows the one before; false if there is none.
  template <typename List>
  __device__ __forceinline__ bool find(int tile, WorkCursor<List>& ahead, const List& list) {
    if (tile > 0 && left_ahead > 0) {
      ahead.next(list);
      left_ahead -= ahead.kv_tile == ahead.range.begin ? 1 + kBorderItems : 1;
    }
    if (left_ahead <= 0) return false;
    ++num_found;
    return true;
  }
  // Whether there is KV tile `tile`, which has been looked for.
  __device__ __forceinline__ bool has(int tile) const { return tile < num_found; }

  // Where a row tile ends whose first KV tile here is `tile`; in the row tile that one is number
  // `kv_tile`, and `kv_end` is one after its last.
  __device__ __forceinline__ int end(int tile, int kv_tile, int kv_end) const {
    return tile + min(kv_end - kv_tile, left);
  }
  // Leaves a row tile after `num_tiles` KV tiles.
  __device__ __forceinline__ void leave(int num_tiles) { left -= num_tiles + kBorderItems; }
  // Whether there is a row tile that begins with KV tile `tile`.
  __device__ __forceinline__ bool begins(int tile) const { return left > 0; }
};

// Every item has a KV tile.
template <>
struct BlockTiles<0> {
  int num_tiles;

  __device__ __forceinline__ explicit BlockTiles(int num_items) : num_tiles(num_items) {}

  template <typename List>
  __device__ __forceinline__ bool find(int tile, WorkCursor<List>& ahead, const List& list) {
    if (tile >= num_tiles) return false;
    if (tile > 0) ahead.next(list);
    return true;
  }
  __device__ __forceinline__ bool has(int tile) const { return tile < num_tiles; }
  __device__ __forceinline__ int end(int tile, int kv_tile, int kv_end) const {
    return min(tile + kv_end - kv_tile, num_tiles);
  }
  __device__ __forceinline__ void leave(int) const {}
  __device__ __forceinline__ bool begins(int tile) const { return tile < num_tiles; }
};

// The sum over lanes 0 .. l, in lane l.
__device__ __forceinline__ int64_t warp_prefix_sum(int64_t value) {
  const int lane = lane_index();
#pragma unroll
  for (int step = 1; step < kWarpThreads; step *= 2) {
    const int64_t below = __shfl_up_sync(0xffffffff, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// Items of one key-value head, of each lane's sequence. A lane counts the first few row tiles by
// itself; the warp counts the rest together (in a prefill there are many).
template <typename List>
__device__ __forceinline__ int64_t count_items(const List& list, const Sequence& sequence) {
  constexpr int kTilesPerLane = 2;
  const int num_row_tiles = list.num_row_tiles(sequence);
  int64_t items = 0;
  for (int i = 0; i < min(num_row_tiles, kTilesPerLane); ++i) {
    items += list.num_items(list.range(sequence, i));
  }
  uint32_t unfinished = __ballot_sync(0xffffffff, num_row_tiles > kTilesPerLane);
  while (unfinished != 0) {
    const int lane = __ffs(unfinished) - 1;
    unfinished &= unfinished - 1;
    const Sequence shared_sequence = {
        .first_query = 0,
        .num_queries = __shfl_sync(0xffffffff, sequence.num_queries, lane),
        .num_tokens = __shfl_sync(0xffffffff, sequence.num_tokens, lane)};
    int64_t sum = 0;
    for (int i = kTilesPerLane + lane_index(); i < list.num_row_tiles(shared_sequence);
         i += kWarpThreads) {
      sum += list.num_items(list.range(shared_sequence, i));
    }
    sum = __shfl_sync(0xffffffff, warp_prefix_sum(sum), kWarpThreads - 1);
    if (lane_index() == lane) items += sum;
  }
  return items;
}

// Divides the list among thread blocks, and finds the item at which a thread block begins. Lies in
// shared memory; all threads call its functions together.
template <typename List, int kNumWarps>
struct Planner {
  static constexpr int kThreads = kNumWarps * kWarpThreads;

  int64_t warp_sums[kNumWarps];
  int64_t offset;    // of the item that is looked for, in its sequence
  int sequence_idx;  // of that sequence

  // Items of one key-value head. The thread block looks at kThreads sequences at a time: `before`
  // counts those of the sequences before the thread's, `total` those of all.
  struct ItemCounts {
    int64_t before, items, total;
  };

  __device__ __forceinline__ ItemCounts count(const List& list, int first_sequence) {
    const int s = first_sequence + threadIdx.x;
    const Sequence sequence = s < list.batch ? list.sequence(s) : Sequence{};
    const int64_t items = count_items(list, sequence);
    const int64_t inclusive = warp_prefix_sum(items);
    const int warp = threadIdx.x / kWarpThreads;
    if (lane_index() == kWarpThreads - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    int64_t before = inclusive - items, total = 0;
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) {
      if (i < warp) before += warp_sums[i];
      total += warp_sums[i];
    }
    __syncthreads();  // before warp_sums is written again
    return {.before = before, .items = items, .total = total};
  }

  __device__ __forceinline__ WorkPartition partition(const List& list) {
    int64_t num_items = 0;
    for (int s = 0; s < list.batch; s += kThreads) num_items += count(list, s).total;
    num_items *= list.kv_heads;
    // So few that each has at least one item with a KV tile.
    const int64_t most = num_items / (List::kBorderItems + 1);
    return {num_items, static_cast<int>(min(most, static_cast<int64_t>(gridDim.x)))};
  }

  // The first KV tile from item `item` on; before it, items without a KV tile are `skipped`.
  __device__ __forceinline__ WorkCursor<List> find(const List& list, const WorkPartition& partition,
                                                   int64_t item, int& skipped) {
    const int64_t head_items = partition.num_items / list.kv_heads;
    WorkCursor<List> cursor;
    cursor.kv_head = static_cast<int>(item / head_items);
    find_sequence(list, item % head_items);
    cursor.sequence_idx = sequence_idx;
    cursor.sequence = list.sequence(sequence_idx);
    skipped = find_row_tile(list, offset, cursor);
    return cursor;
  }

 private:
  // Sets `sequence_idx` and `offset` to where item `item` of a key-value head is.
  __device__ __forceinline__ void find_sequence(const List& list, int64_t item) {
    for (int s = 0; s < list.batch; s += kThreads) {
      const ItemCounts counts = count(list, s);
      if (item < counts.total) {
        if (counts.before <= item && item < counts.before + counts.items) {
          offset = item - counts.before, sequence_idx = s + threadIdx.x;
        }
        break;
      }
      item -= counts.total;
    }
    __syncthreads();
  }

  // Finds the first KV tile from item `item` of the cursor's sequence on, 32 row tiles at a time;
  // returns how many items without a KV tile come first.
  static __device__ __forceinline__ int find_row_tile(const List& list, int64_t item,
                                                      WorkCursor<List>& cursor) {
    for (int first = 0;; first += kWarpThreads) {
      const int row_tile = first + lane_index();
      const bool exists = row_tile < list.num_row_tiles(cursor.sequence);
      const int64_t items = exists ? list.num_items(list.range(cursor.sequence, row_tile)) : 0;
      const int64_t inclusive = warp_prefix_sum(items);
      const uint32_t beyond = __ballot_sync(0xffffffff, inclusive > item);
      if (beyond != 0) {
        const int lane = __ffs(beyond) - 1;
        cursor.row_tile = first + lane;
        item -= __shfl_sync(0xffffffff, inclusive - items, lane);
        break;
      }
      item -= __shfl_sync(0xffffffff, inclusive, kWarpThreads - 1);
    }
    cursor.range = list.range(cursor.sequence, cursor.row_tile);
    int tile = static_cast<int>(item) - List::kBorderItems, skipped = 0;
    if constexpr (List::kBorderItems > 0) {
      skipped = max(-tile, 0);
      tile += skipped;
    }
    cursor.kv_tile = cursor.range.begin + tile;
    return skipped;
  }
};

}  // namespace kernelcat
