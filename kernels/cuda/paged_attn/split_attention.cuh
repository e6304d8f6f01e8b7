// What a thread block of paged_attn/split does.
#pragma once

#include "cache_ring.cuh"
#include "merge.cuh"

namespace kernelcat {

template <typename Kind, int BLOCK_M, int BLOCK_N, int kNumWarps, int kNumStages,
          int kBorderItems = 0>
struct SplitAttention {
  static constexpr int kThreads = kNumWarps * kWarpThreads;
  static constexpr int kWarpsM = BLOCK_M / 16, kWarpsN = kNumWarps / kWarpsM;
  static constexpr int kWarpTokens = BLOCK_N / kWarpsN;
  using List = WorkList<BLOCK_M, BLOCK_N, Kind::kWindow, kBorderItems>;
  using Cursor = WorkCursor<List>;
  using Ring = CacheRing<Kind, BLOCK_N, kThreads, kNumStages>;
  using Queries = QueryTile<Kind>;
  // With few rows the kernel is memory-bound, except with NVFP4, so remainders cost nothing. Scales
  // of pages make weights of any size.
  static constexpr bool kPrecise =
      (BLOCK_M == 16 && !kIsNvfp4<typename Kind::Cached>) || Kind::kScales == Scales::kPage;
  // Without border items the machine code stays as its receipts have it.
  static constexpr bool kQuickCap = kBorderItems > 0;
  using Warp = WarpAttention<Kind, kWarpTokens, kPrecise, kQuickCap>;
  using Partials = PartialResults<Kind, BLOCK_M>;
  using Merge = WarpMerge<Kind, BLOCK_M, kNumWarps, 2 * Ring::kTileBytes>;

  struct Shared {
    typename Ring::Rows rows[kNumStages];
    Planner<List, kNumWarps> planner;
    Merge merge;
    bool is_last;
    // What is needed only between two row tiles lies here and takes no registers.
    WorkPartition partition;
    Cursor current;      // the first item of the row tile that is worked on
    int64_t first_item;  // of that row tile, also where another thread block has it
  };

  const AttentionArgs<Kind>& args;
  Partials partials;
  List list;
  uint8_t* stages;  // in shared memory; the query tile follows
  Shared& shared;

  __device__ __forceinline__ uint8_t* query_tile() const {
    return stages + kNumStages * Ring::kStageBytes;
  }

  // Loads the query tile; rows beyond the sequence's are zero. `negates` changes all signs, which
  // makes up for a negative scale.
  __device__ __forceinline__ void load_queries(const TileRows<Kind>& rows, int num_rows,
                                               bool negates) const {
    const uint32_t signs = negates ? 0x80008000 : 0;
    for (int i = threadIdx.x; i < BLOCK_M * Queries::kUnits; i += kThreads) {
      const int row = i / Queries::kUnits, unit = i % Queries::kUnits;
      uint4 elements = {};
      if (row < num_rows) {
        const int64_t source = rows.index(args, row) * Kind::kHeadDim + unit * 8;
        elements = __ldg(reinterpret_cast<const uint4*>(args.q + source));
      }
      elements.x ^= signs, elements.y ^= signs, elements.z ^= signs, elements.w ^= signs;
      Queries::store(query_tile(), row, unit, elements);
    }
  }

  // What rows `row` and `row + 8` of the sequence see.
  __device__ __forceinline__ VisibleTokens visible(const Sequence& sequence, int row) const {
    VisibleTokens tokens;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tokens.end[i] = sequence.context() + (row + 8 * i) / list.group + 1;
      tokens.begin[i] = Kind::kWindow ? tokens.end[i] - list.window : 0;
    }
    return tokens;
  }

  // The factor of q . k, in base 2 where there is no softcap.
  __device__ __forceinline__ float score_factor(int kv_head) const {
    float factor = args.sm_scale * Kind::kCachedFactor;
    if constexpr (Kind::kScales == Scales::kHead) factor *= __ldg(args.k_scale + kv_head);
    return Kind::kSoftcap ? factor / args.softcap : factor * kLog2E;
  }

  // The rows of the row tile that is worked on.
  __device__ __forceinline__ TileRows<Kind> tile_rows() const {
    const Cursor& current = shared.current;
    return {.first_query = current.sequence.first_query,
            .first_row = current.row_tile * BLOCK_M,
            .kv_head = current.kv_head};
  }
  __device__ __forceinline__ int num_tile_rows() const {
    return min(list.num_rows(shared.current.sequence) - tile_rows().first_row, BLOCK_M);
  }

  // Stores the rows of the row tile, or this thread block's part of them. The last thread block
  // that stores a part adds up all parts.
  __device__ __forceinline__ void finish(const Warp& warp, float* buffer) const {
    const TileRows<Kind> rows = tile_rows();
    const int num_rows = num_tile_rows();
    const int64_t first_item = shared.first_item;
    const int first_block = shared.partition.owner(first_item);
    const int last_block =
        shared.partition.owner(first_item + shared.current.range.num_tiles() - 1);
    if (first_block == last_block) {
      shared.merge.merge(buffer, warp, num_rows, [&](int row, int column, const PartialSum& sum) {
        rows.store(args, row, column, sum);
      });
      __syncthreads();
      return;
    }
    const int slot = Partials::slot(blockIdx.x, first_block == blockIdx.x);
    shared.merge.merge(buffer, warp, num_rows, [&](int row, int column, const PartialSum& sum) {
      partials.store(slot, row, column, sum);
    });
    if (!partials.is_last(first_block, last_block - first_block + 1, &shared.is_last)) return;
    for (int i = threadIdx.x; i < num_rows * (Kind::kHeadDim / 4); i += kThreads) {
      const int row = i / (Kind::kHeadDim / 4), column = i % (Kind::kHeadDim / 4) * 4;
      rows.store(args, row, column, partials.sum(first_block, last_block, row, column));
    }
  }

  __device__ __forceinline__ void run() {
    const WorkPartition partition = shared.planner.partition(list);
    if (blockIdx.x >= partition.num_blocks) return;
    const int64_t begin = partition.begin(blockIdx.x);
    const int num_items = static_cast<int>(partition.begin(blockIdx.x + 1) - begin);
    int skipped;  // items before the first KV tile
    Cursor ahead = shared.planner.find(list, partition, begin, skipped);  // the tile looked up
    BlockTiles<kBorderItems> tiles(num_items - skipped);
    if (threadIdx.x == 0) {
      shared.partition = partition;
      shared.current = ahead;
      shared.first_item = begin + skipped - (ahead.kv_tile - ahead.range.begin);
    }
    const Ring ring = {shared_address(stages), shared.rows};
    const auto look_up = [&](int item) {
      if (!tiles.find(item, ahead, list)) return TokenPlace();
      return Ring::look_up(args, ahead);
    };
    TokenPlace places[kNumStages];
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) places[i] = look_up(i);
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) ring.write_row(args, i, places[i]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNumStages - 1; ++i) {
      if (tiles.has(i)) ring.copy(args, i);
      commit_async_copies();
    }

    const int warp_idx = warp_index();
    const int warp_row = warp_idx % kWarpsM * 16, warp_token = warp_idx / kWarpsM * kWarpTokens;
    for (int item = 0; tiles.begins(item);) {
      const Sequence sequence = shared.current.sequence;
      int tile = shared.current.kv_tile;
      const int first = item, end = tiles.end(item, tile, shared.current.range.end);
      const TileRows<Kind> rows = tile_rows();
      const int num_rows = num_tile_rows(), last_row = rows.first_row + num_rows - 1;
      // All rows see tokens [all_begin, all_end).
      const int all_end = sequence.context() + rows.first_row / list.group + 1;
      const int all_begin = sequence.context() + last_row / list.group + 1 - list.window;
      const VisibleTokens tokens = visible(sequence, rows.first_row + warp_row + lane_index() / 4);
      const float factor = score_factor(rows.kv_head);
      // A factor of zero would turn masked scores into NaN.
      const ScoreScale scale = {fmaxf(fabsf(factor), 1e-30f), args.softcap * kLog2E};

      load_queries(rows, num_rows, factor < 0.0f);
      __syncthreads();
      Warp warp;
      warp.begin(shared_address(query_tile()), warp_row);
      for (; item < end; ++item, ++tile) {
        const TokenPlace next = look_up(item + kNumStages);
        wait_async_copies<kNumStages - 2>();
        __syncthreads();  // the KV tile has landed, and all warps have read the one before
        if (tiles.has(item + kNumStages - 1)) ring.copy(args, item + kNumStages - 1);
        commit_async_copies();
        const int token = tile * BLOCK_N;
        const bool is_masked = token + BLOCK_N > all_end || (Kind::kWindow && token < all_begin);
        warp.attend(ring.tile(stages, item, 0), ring.tile(stages, item, 1), warp_token,
                    token + warp_token, is_masked, tokens, scale);
        ring.write_row(args, item + kNumStages, next);
      }
      warp.softmax.reduce_row_sums();
      // The stage that was read last is free until the next item.
      finish(warp, reinterpret_cast<float*>(stages + (item - 1) % kNumStages * Ring::kStageBytes));
      tiles.leave(item - first);
      if (threadIdx.x == 0 && tiles.begins(item)) {
        shared.first_item += List::num_items(shared.current.range);
        shared.current.next_row_tile(list);
      }
      __syncthreads();
    }
    wait_async_copies<0>();
  }
};

}  // namespace kernelcat
