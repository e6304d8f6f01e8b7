// The work of a launch as one list of items, divided evenly among teams of persistent thread
// blocks. A team is one or more thread blocks that work on the same items: with neighbouring rows,
// or with parts of the columns.
//
// An item is one row tile against one KV tile: BLOCK_M rows of a sequence (of the whole team)
// against BLOCK_N of its cached tokens. Rows are the query tokens with their heads side by side:
// row = query * heads + head. The list runs over sequences, row tiles and, innermost, KV tiles.
//
// The list is made on the device because a captured graph may be replayed with other lengths (after
// FlashMLA's planner). No load can start before the list is made, so that has to be fast: in 32
// bits, with one or two divisions, one block-wide barrier per 384 sequences and one for the result.
#pragma once

#include <kernelcat/prefetch.cuh>
#include <kernelcat/sequences.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// Team t takes items [begin(t), begin(t + 1)), at least one. The first `num_larger` teams have
// min_items + 1, the others min_items.
struct WorkPartition {
  int num_teams, min_items, num_larger;

  // Among up to `max_teams`, of which each gets at least `min_tiles` items (if there are as many).
  static __device__ __forceinline__ WorkPartition of(int num_items, int max_teams, int min_tiles) {
    const int num_teams =
        max(min(static_cast<int>(static_cast<unsigned>(num_items) / min_tiles), max_teams),
            min(num_items, 1));
    if (num_teams == 0) return {};
    const int min_items = static_cast<unsigned>(num_items) / num_teams;
    return {num_teams, min_items, num_items - min_items * num_teams};
  }
  __device__ __forceinline__ int begin(int team) const {
    return min_items * team + min(team, num_larger);
  }
  __device__ __forceinline__ int owner(int item) const {
    const int larger_items = num_larger * (min_items + 1);  // of all larger teams
    const unsigned offset = item < larger_items ? item : item - larger_items;
    return item < larger_items ? offset / (min_items + 1) : num_larger + offset / min_items;
  }
};

template <int BLOCK_M, int BLOCK_N>
struct WorkList {
  const int* kv_lens;  // (batch,)
  const int* cu_q;     // (batch + 1,)
  int batch, heads;

  // Brings what is read first into L2, before grid_dependency_wait(): lengths, and the beginning of
  // each sequence in `block_table`, (batch, table_width).
  __device__ __forceinline__ void prefetch(const int* block_table, int table_width) const {
    constexpr int kLine = 128 / sizeof(int);
    const int thread = static_cast<int>(threadIdx.x), first = thread * kLine;
    if (first < batch) prefetch_l2(kv_lens + first);
    if (first <= batch) prefetch_l2(cu_q + first);
    if (thread < batch && table_width > 0) {
      prefetch_l2(block_table + static_cast<int64_t>(thread) * table_width);
    }
  }

  __device__ __forceinline__ Sequence sequence(int index) const {
    return load_sequence(cu_q, kv_lens, index);
  }
  __device__ __forceinline__ int num_rows(const Sequence& sequence) const {
    return sequence.num_queries * heads;
  }
  __device__ __forceinline__ int num_row_tiles(const Sequence& sequence) const {
    return ceil_div(num_rows(sequence), BLOCK_M);
  }
  // KV tiles of each row tile: at least one, even without visible tokens, because every row must be
  // written. Early queries do not see the last few tokens; that is not worth a shorter range.
  __device__ __forceinline__ int num_kv_tiles(const Sequence& sequence) const {
    return max(ceil_div(sequence.num_tokens, BLOCK_N), 1);
  }
};

// An item of the list.
template <typename List>
struct WorkCursor {
  int sequence_idx = 0, row_tile = 0, kv_tile = 0;
  Sequence sequence;

  __device__ __forceinline__ void next_row_tile(const List& list) {
    kv_tile = 0;
    if (++row_tile < list.num_row_tiles(sequence)) return;
    row_tile = 0;
    do {
      sequence = list.sequence(++sequence_idx);
    } while (sequence.num_queries == 0);
  }
};

// Divides the list among teams, and finds the item at which a team begins, by block-wide prefix
// sums. Lies in shared memory; all threads call its functions together.
template <typename List, int kNumWarps>
struct Planner {
  static constexpr int kThreads = kNumWarps * kWarpThreads;

  int warp_sums[2][kNumWarps];  // used in turn, so that one barrier is enough
  Sequence sequence;            // that holds the item that is looked for
  int sequence_idx;             // of that sequence
  int offset;                   // of the item in that sequence

  // Items of the thread's sequence. The thread block looks at kThreads sequences at a time:
  // `before` counts the items of the sequences before the thread's, `all` those of all.
  struct ItemCounts {
    Sequence sequence;
    int before, items, all;
  };

  __device__ __forceinline__ ItemCounts count(const List& list, int first_sequence) {
    const int s = first_sequence + static_cast<int>(threadIdx.x);
    ItemCounts counts = {};
    if (s < list.batch) {
      counts.sequence = list.sequence(s);
      counts.items = list.num_row_tiles(counts.sequence) * list.num_kv_tiles(counts.sequence);
    }
    const int lane = lane_index(), warp = threadIdx.x / kWarpThreads;
    int inclusive = counts.items;
#pragma unroll
    for (int step = 1; step < kWarpThreads; step *= 2) {
      const int below = __shfl_up_sync(0xffffffff, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    int (&sums)[kNumWarps] = warp_sums[first_sequence / kThreads % 2];
    if (lane == kWarpThreads - 1) sums[warp] = inclusive;
    __syncthreads();
    counts.before = inclusive - counts.items;
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) {
      if (i < warp) counts.before += sums[i];
      counts.all += sums[i];
    }
    return counts;
  }

  // Divides the list among up to `max_teams`, and sets `cursor` to the first item of `team`, if the
  // team has any.
  __device__ __forceinline__ WorkPartition partition(const List& list, int max_teams, int min_tiles,
                                                     int team, WorkCursor<List>& cursor) {
    ItemCounts counts = count(list, 0);
    int num_items = counts.all;
    for (int s = kThreads; s < list.batch; s += kThreads) num_items += count(list, s).all;
    const WorkPartition partition = WorkPartition::of(num_items, max_teams, min_tiles);
    if (team >= partition.num_teams) return partition;
    int item = partition.begin(team), first = 0;
    if (list.batch > kThreads) {
      __syncthreads();
      counts = count(list, 0);
    }
    while (item >= counts.all) {
      item -= counts.all;
      first += kThreads;
      counts = count(list, first);
    }
    if (counts.before <= item && item < counts.before + counts.items) {
      sequence = counts.sequence, sequence_idx = first + threadIdx.x;
      offset = item - counts.before;
    }
    __syncthreads();
    const unsigned num_kv_tiles = list.num_kv_tiles(sequence);
    cursor.sequence_idx = sequence_idx, cursor.sequence = sequence;
    cursor.row_tile = static_cast<unsigned>(offset) / num_kv_tiles;
    cursor.kv_tile = offset - cursor.row_tile * num_kv_tiles;
    return partition;
  }
};

}  // namespace kernelcat
