// The work of a launch as one list of units, dealt out evenly to the blocks of a persistent grid.
//
// A unit is BLOCK_N tokens of the cache for BLOCK_M rows of a sequence. The rows are its queries,
// heads side by side: row = query * heads + head. The list runs over sequences, tiles of rows and,
// innermost, tokens. It is made on the device, from lengths that a captured graph may find changed
// (after FlashMLA's planner), and quickly, for nothing can be loaded before: in 32 bits, with a
// division or two, and a barrier of the block for 384 sequences and one for the result.
#pragma once

#include <kernelcat/sequences.cuh>
#include <kernelcat/sync.cuh>

namespace kernelcat {

// Block b takes units [begin(b), begin(b + 1)), at least one: the first ones may have one more.
struct Shares {
  int num_blocks, units, more;

  // For each of `most` blocks, but none that would have less than `least` units.
  static __device__ __forceinline__ Shares of(int total, int most, int least) {
    const int num_blocks =
        max(min(static_cast<int>(static_cast<unsigned>(total) / least), most), min(total, 1));
    if (num_blocks == 0) return {};
    const int units = static_cast<unsigned>(total) / num_blocks;
    return {num_blocks, units, total - units * num_blocks};
  }
  __device__ __forceinline__ int begin(int block) const { return units * block + min(block, more); }
  __device__ __forceinline__ int owner(int unit) const {
    const int of_larger = more * (units + 1);
    const unsigned own = unit < of_larger ? unit : unit - of_larger;
    return unit < of_larger ? own / (units + 1) : more + own / units;
  }
};

__device__ __forceinline__ void prefetch_line(const int* place) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
}

template <int BLOCK_M, int BLOCK_N>
struct WorkList {
  const int *kv_lens, *cu_q;
  int batch, heads;

  // What is looked at first comes to L2, where writes of kernels before this one are seen: they
  // need not have ended. Of the table (batch, table_width), where each sequence begins.
  __device__ __forceinline__ void prefetch(const int* block_table, int table_width) const {
    constexpr int kLine = 128 / sizeof(int);
    const int thread = static_cast<int>(threadIdx.x), first = thread * kLine;
    if (first < batch) prefetch_line(kv_lens + first);
    if (first <= batch) prefetch_line(cu_q + first);
    if (thread < batch && table_width > 0) {
      prefetch_line(block_table + static_cast<int64_t>(thread) * table_width);
    }
  }

  __device__ __forceinline__ Sequence sequence(int s) const {
    const int begin = __ldg(cu_q + s);
    return {begin, __ldg(cu_q + s + 1) - begin, __ldg(kv_lens + s)};
  }
  __device__ __forceinline__ int num_rows(const Sequence& sequence) const {
    return sequence.num_queries * heads;
  }
  __device__ __forceinline__ int num_row_tiles(const Sequence& sequence) const {
    return ceil_div(num_rows(sequence), BLOCK_M);
  }
  // Of tokens, for each tile of rows: at least one, even where nothing is seen, so that every row
  // is written. Early queries do not see the last few tokens; that is not worth a shorter range.
  __device__ __forceinline__ int num_tiles(const Sequence& sequence) const {
    return max(ceil_div(sequence.num_tokens, BLOCK_N), 1);
  }
};

// A place in the list.
template <typename List>
struct Cursor {
  int index = 0, row_tile = 0, tile = 0;  // index: of the sequence; tile: of tokens
  Sequence sequence;

  __device__ __forceinline__ void next_row_tile(const List& list) {
    tile = 0;
    if (++row_tile < list.num_row_tiles(sequence)) return;
    row_tile = 0;
    do {
      sequence = list.sequence(++index);
    } while (sequence.num_queries == 0);
  }
};

// Finds the sequence that holds a unit, by a block-wide scan of what sequences cost.
template <typename List, int kNumWarps>
struct Planner {
  static constexpr int kThreads = kNumWarps * kWarpThreads;

  int warp_sums[2][kNumWarps];  // they take turns, so that one barrier is enough
  Sequence sequence;
  int index, offset;  // of the sequence; of the unit in it

  struct Cost {
    Sequence sequence;
    int before, own, all;  // `all` of the sequences of one pass over the threads
  };

  __device__ __forceinline__ Cost cost_of(const List& list, int first) {
    const int s = first + static_cast<int>(threadIdx.x);
    Cost cost = {};
    if (s < list.batch) {
      cost.sequence = list.sequence(s);
      cost.own = list.num_row_tiles(cost.sequence) * list.num_tiles(cost.sequence);
    }
    const int lane = lane_index(), warp = threadIdx.x / kWarpThreads;
    int inclusive = cost.own;
#pragma unroll
    for (int step = 1; step < kWarpThreads; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    int (&sums)[kNumWarps] = warp_sums[first / kThreads % 2];
    if (lane == kWarpThreads - 1) sums[warp] = inclusive;
    __syncthreads();
    cost.before = inclusive - cost.own;
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) {
      if (i < warp) cost.before += sums[i];
      cost.all += sums[i];
    }
    return cost;
  }

  // How the list is dealt out to `num_blocks`, and where `block`'s share begins: nowhere, if it has
  // none. All threads call it.
  __device__ __forceinline__ Shares deal(const List& list, int num_blocks, int least, int block,
                                         Cursor<List>& cursor) {
    Cost cost = cost_of(list, 0);
    int total = cost.all;
    for (int s = kThreads; s < list.batch; s += kThreads) total += cost_of(list, s).all;
    const Shares shares = Shares::of(total, num_blocks, least);
    if (block >= shares.num_blocks) return shares;
    int unit = shares.begin(block), first = 0;
    if (list.batch > kThreads) {
      __syncthreads();
      cost = cost_of(list, 0);
    }
    while (unit >= cost.all) {
      unit -= cost.all;
      first += kThreads;
      cost = cost_of(list, first);
    }
    if (cost.before <= unit && unit < cost.before + cost.own) {
      sequence = cost.sequence, index = first + threadIdx.x, offset = unit - cost.before;
    }
    __syncthreads();
    const unsigned num_tiles = list.num_tiles(sequence);
    cursor.index = index, cursor.sequence = sequence;
    cursor.row_tile = static_cast<unsigned>(offset) / num_tiles;
    cursor.tile = offset - cursor.row_tile * num_tiles;
    return shares;
  }
};

}  // namespace kernelcat
