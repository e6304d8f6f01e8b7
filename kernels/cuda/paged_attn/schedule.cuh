// The work of a launch as one list of units, dealt out evenly to the blocks of a persistent grid.
//
// A unit is BLOCK_N tokens of the cache for BLOCK_M rows of a sequence and key-value head. The rows
// are its queries, the heads that share the key-value head side by side: row = query * group +
// head. The list runs over heads, sequences, tiles of rows and, innermost, tokens, so that a
// block's share is whole tiles of rows but for its two ends, and blocks that are at the same tokens
// of different heads are so at the same time: a sector of short rows or of their scales has several
// heads'. It is made on the device, from lengths that a captured graph may find changed. (After
// FlashMLA's and FlashInfer's planners.)
#pragma once

#include <kernelcat/sync.cuh>

namespace kernelcat {

struct Sequence {
  int first_query = 0, num_queries = 0, num_tokens = 0;

  // Query i is token `context() + i`.
  __device__ __forceinline__ int context() const { return num_tokens - num_queries; }
};

// The tokens that some row of a tile sees, and the tiles of BLOCK_N tokens that hold them: at least
// one, even where nothing is seen, so that every row is written.
struct TileRange {
  int first_token, end_token;
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
};

// Block b takes units [begin(b), begin(b + 1)), at least one.
struct Shares {
  int64_t total;
  int num_blocks;

  __device__ __forceinline__ int64_t begin(int block) const { return total * block / num_blocks; }
  __device__ __forceinline__ int owner(int64_t unit) const {
    return static_cast<int>(((unit + 1) * num_blocks - 1) / total);
  }
};

template <int BLOCK_M, int BLOCK_N, bool kWindow>
struct WorkList {
  const int *kv_lens, *cu_q;
  int batch, kv_heads, group, window;

  __device__ __forceinline__ Sequence sequence(int s) const {
    const int begin = __ldg(cu_q + s);
    return {begin, __ldg(cu_q + s + 1) - begin, __ldg(kv_lens + s)};
  }
  __device__ __forceinline__ int num_rows(const Sequence& sequence) const {
    return sequence.num_queries * group;
  }
  __device__ __forceinline__ int num_row_tiles(const Sequence& sequence) const {
    return ceil_div(num_rows(sequence), BLOCK_M);
  }

  __device__ __forceinline__ TileRange range(const Sequence& sequence, int row_tile) const {
    const int last_row = min((row_tile + 1) * BLOCK_M, num_rows(sequence)) - 1;
    const int end_token = max(sequence.context() + last_row / group + 1, 0);
    int first_token = 0;
    if constexpr (kWindow) {
      const int first_query = row_tile * BLOCK_M / group;
      first_token = max(sequence.context() + first_query + 1 - window, 0);
    }
    const int begin = first_token / BLOCK_N;
    return {first_token, end_token, begin, max(ceil_div(end_token, BLOCK_N), begin + 1)};
  }
};

// A place in the list.
template <typename List>
struct Cursor {
  int index = 0, head = 0, row_tile = 0;  // index: of the sequence
  Sequence sequence;
  TileRange range;
  int tile = 0;  // of tokens

  __device__ __forceinline__ void next_row_tile(const List& list) {
    if (++row_tile == list.num_row_tiles(sequence)) {
      row_tile = 0;
      do {
        if (++index == list.batch) index = 0, ++head;
        sequence = list.sequence(index);
      } while (sequence.num_queries == 0);
    }
    range = list.range(sequence, row_tile);
    tile = range.begin;
  }

  __device__ __forceinline__ void next(const List& list) {
    if (++tile == range.end) next_row_tile(list);
  }
};

__device__ __forceinline__ int64_t warp_inclusive_sum(int64_t value) {
  const int lane = lane_index();
#pragma unroll
  for (int step = 1; step < kWarpThreads; step *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffff, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Units of each lane's sequence, of one head. A lane counts a few tiles of rows itself; where there
// are many (a prefill), the warp does.
template <typename List>
__device__ __forceinline__ int64_t num_units(const List& list, const Sequence& sequence) {
  constexpr int kFew = 2;
  const int num_tiles = list.num_row_tiles(sequence);
  int64_t units = 0;
  for (int i = 0; i < min(num_tiles, kFew); ++i) units += list.range(sequence, i).size();
  uint32_t many = __ballot_sync(0xffffffff, num_tiles > kFew);
  while (many != 0) {
    const int lane = __ffs(many) - 1;
    many &= many - 1;
    const Sequence other = {0, __shfl_sync(0xffffffff, sequence.num_queries, lane),
                            __shfl_sync(0xffffffff, sequence.num_tokens, lane)};
    int64_t sum = 0;
    for (int i = kFew + lane_index(); i < list.num_row_tiles(other); i += kWarpThreads) {
      sum += list.range(other, i).size();
    }
    sum = __shfl_sync(0xffffffff, warp_inclusive_sum(sum), kWarpThreads - 1);
    if (lane_index() == lane) units += sum;
  }
  return units;
}

// Block-wide scans of what sequences cost, and the search for the one that holds a unit.
template <typename List, int kNumWarps>
struct Planner {
  static constexpr int kThreads = kNumWarps * kWarpThreads;

  int64_t warp_sums[kNumWarps];
  int64_t offset;  // of the unit in its sequence
  int index;

  struct Cost {
    int64_t before, own, all;  // of one head; `all` of the sequences of one pass over the threads
  };

  __device__ __forceinline__ Cost cost_of(const List& list, int first) {
    const int s = first + threadIdx.x;
    const Sequence sequence = s < list.batch ? list.sequence(s) : Sequence{};
    const int64_t own = num_units(list, sequence);
    const int64_t inclusive = warp_inclusive_sum(own);
    const int warp = threadIdx.x / kWarpThreads;
    if (lane_index() == kWarpThreads - 1) warp_sums[warp] = inclusive;
    __syncthreads();
    int64_t before = inclusive - own, all = 0;
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) {
      if (i < warp) before += warp_sums[i];
      all += warp_sums[i];
    }
    __syncthreads();  // before warp_sums is written again
    return {before, own, all};
  }

  __device__ __forceinline__ Shares shares(const List& list) {
    int64_t total = 0;
    for (int s = 0; s < list.batch; s += kThreads) total += cost_of(list, s).all;
    total *= list.kv_heads;
    return {total, static_cast<int>(min(total, static_cast<int64_t>(gridDim.x)))};
  }

  __device__ __forceinline__ Cursor<List> find(const List& list, const Shares& shares,
                                               int64_t unit) {
    const int64_t per_head = shares.total / list.kv_heads;
    Cursor<List> cursor;
    cursor.head = static_cast<int>(unit / per_head);
    unit %= per_head;
    for (int s = 0; s < list.batch; s += kThreads) {
      const Cost cost = cost_of(list, s);
      if (unit < cost.all) {
        if (cost.before <= unit && unit < cost.before + cost.own) {
          offset = unit - cost.before, index = s + threadIdx.x;
        }
        break;
      }
      unit -= cost.all;
    }
    __syncthreads();
    cursor.index = index;
    cursor.sequence = list.sequence(index);
    int64_t rest = offset;
    // Which tile of rows: 32 at a time.
    for (int first = 0;; first += kWarpThreads) {
      const int own_tile = first + lane_index();
      const bool exists = own_tile < list.num_row_tiles(cursor.sequence);
      const int64_t own = exists ? list.range(cursor.sequence, own_tile).size() : 0;
      const int64_t inclusive = warp_inclusive_sum(own);
      const uint32_t beyond = __ballot_sync(0xffffffff, inclusive > rest);
      if (beyond != 0) {
        const int lane = __ffs(beyond) - 1;
        cursor.row_tile = first + lane;
        rest -= __shfl_sync(0xffffffff, inclusive - own, lane);
        break;
      }
      rest -= __shfl_sync(0xffffffff, inclusive, kWarpThreads - 1);
    }
    cursor.range = list.range(cursor.sequence, cursor.row_tile);
    cursor.tile = cursor.range.begin + static_cast<int>(rest);
    return cursor;
  }
};

}  // namespace kernelcat
