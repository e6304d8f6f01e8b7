// Attention over a paged cache for decode and prefill alike, by mma.sync from cp.async stages.
//
// The queries of a sequence and the heads that share a key-value head are the rows of one product,
// so that keys and values are read once for all of them, and warps keep their rows' softmax in
// registers (FlashAttention-2). Where there are few rows, the warps of a block share out the tokens
// of a tile instead, and blocks the tokens of a sequence (flash-decoding). Every block gets the
// same number of tiles of tokens, whatever the lengths (FlashMLA, FlashInfer), and its copies run
// ahead of it across the borders of sequences and heads.
#include "merge.cuh"
#include "ring.cuh"

namespace kernelcat {

template <typename Kind, int BLOCK_M, int BLOCK_N, int kNumWarps, int kNumStages>
struct SplitAttention {
  static constexpr int kThreads = kNumWarps * kWarpThreads;
  static constexpr int kWarpsM = BLOCK_M / 16, kWarpsN = kNumWarps / kWarpsM;
  static constexpr int kWarpTokens = BLOCK_N / kWarpsN;
  using List = WorkList<BLOCK_M, BLOCK_N, Kind::kWindow>;
  using Ring = CacheRing<Kind, BLOCK_N, kThreads, kNumStages>;
  using Queries = QueryTile<Kind>;
  // Memory-bound where there are few rows, but for NVFP4; scales of pages make weights of any size.
  static constexpr bool kPrecise =
      (BLOCK_M == 16 && !kIsNvfp4<typename Kind::Cached>) || Kind::kScales == Scales::kPage;
  using Warp = WarpAttention<Kind, kWarpTokens, kPrecise>;
  using Space = Workspace<Kind, BLOCK_M>;
  using Sum = BlockSum<Kind, BLOCK_M, kNumWarps, 2 * Ring::kTileBytes>;

  struct Shared {
    typename Ring::Rows rows[kNumStages];
    Planner<List, kNumWarps> planner;
    Sum sum;
    bool is_last;
    // What is not needed between two tiles of rows takes no registers there.
    Shares shares;
    Cursor<List> reading;
    int64_t first_unit;  // of the tile of rows that is being read
  };

  const Attention<Kind>& call;
  Space space;
  List list;
  uint8_t* stages;  // then the tile of queries
  Shared& shared;

  __device__ __forceinline__ uint8_t* query_tile() const {
    return stages + kNumStages * Ring::kStageBytes;
  }

  // Rows beyond the sequence's are zero. `negate` is what a negative scale leaves to do.
  __device__ __forceinline__ void load_queries(const TileRows<Kind>& rows, int num_rows,
                                               bool negate) const {
    const uint32_t signs = negate ? 0x80008000 : 0;
    for (int i = threadIdx.x; i < BLOCK_M * Queries::kUnits; i += kThreads) {
      const int row = i / Queries::kUnits, unit = i % Queries::kUnits;
      uint4 eight = {};
      if (row < num_rows) {
        const int64_t place = rows.at(call, row) * Kind::kHeadDim + unit * 8;
        eight = __ldg(reinterpret_cast<const uint4*>(call.q + place));
      }
      eight.x ^= signs, eight.y ^= signs, eight.z ^= signs, eight.w ^= signs;
      Queries::store(query_tile(), row, unit, eight);
    }
  }

  // Of rows `row` and `row + 8` of the list's rows.
  __device__ __forceinline__ Visible visible(const Sequence& sequence, int row) const {
    Visible tokens;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tokens.end[i] = sequence.context() + (row + 8 * i) / list.group + 1;
      tokens.begin[i] = Kind::kWindow ? tokens.end[i] - list.window : 0;
    }
    return tokens;
  }

  // Of products of queries and keys, in base 2 where there is no softcap.
  __device__ __forceinline__ float score_factor(int kv_head) const {
    float factor = call.sm_scale * Kind::kGrowth;
    if constexpr (Kind::kScales == Scales::kHead) factor *= __ldg(call.k_scale + kv_head);
    return Kind::kSoftcap ? factor / call.softcap : factor * kLog2E;
  }

  __device__ __forceinline__ TileRows<Kind> tile_rows() const {
    const Cursor<List>& reading = shared.reading;
    return {reading.sequence.first_query, reading.row_tile * BLOCK_M, reading.head};
  }
  __device__ __forceinline__ int live_rows() const {
    return min(list.num_rows(shared.reading.sequence) - tile_rows().first_row, BLOCK_M);
  }

  // Stores the tile of rows, or what this block has of it; the last block that has any stores all.
  __device__ __forceinline__ void finish(const Warp& own, float* buffer) const {
    const TileRows<Kind> rows = tile_rows();
    const int num_rows = live_rows();
    const int64_t first_unit = shared.first_unit;
    const int first_block = shared.shares.owner(first_unit);
    const int last_block = shared.shares.owner(first_unit + shared.reading.range.size() - 1);
    if (first_block == last_block) {
      shared.sum.merge(buffer, own, num_rows, [&](int row, int column, const PartialSum& sum) {
        rows.store(call, row, column, sum);
      });
      __syncthreads();
      return;
    }
    const int slot = Space::slot(blockIdx.x, first_block == blockIdx.x);
    shared.sum.merge(buffer, own, num_rows, [&](int row, int column, const PartialSum& sum) {
      space.put(slot, row, column, sum);
    });
    if (!space.is_last(first_block, last_block - first_block + 1, &shared.is_last)) return;
    for (int i = threadIdx.x; i < num_rows * (Kind::kHeadDim / 4); i += kThreads) {
      const int row = i / (Kind::kHeadDim / 4), column = i % (Kind::kHeadDim / 4) * 4;
      rows.store(call, row, column, space.sum(first_block, last_block, row, column));
    }
  }

  __device__ __forceinline__ void run() {
    const Shares shares = shared.planner.shares(list);
    if (blockIdx.x >= shares.num_blocks) return;
    const int64_t begin = shares.begin(blockIdx.x);
    const int count = static_cast<int>(shares.begin(blockIdx.x + 1) - begin);
    Cursor<List> ahead = shared.planner.find(list, shares, begin);
    if (threadIdx.x == 0) {
      shared.shares = shares;
      shared.reading = ahead;
      shared.first_unit = begin - (ahead.tile - ahead.range.begin);
    }
    const Ring ring = {shared_address(stages), shared.rows};
    const auto look_up = [&](int unit) {
      if (unit >= count) return Lookup();
      if (unit > 0) ahead.next(list);
      return Ring::look_up(call, ahead);
    };
    Lookup found[kNumStages];
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) found[i] = look_up(i);
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) ring.tell(call, i, found[i]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNumStages - 1; ++i) {
      if (i < count) ring.copy(call, i);
      commit_async_copies();
    }

    const int warp = warp_index();
    const int warp_row = warp % kWarpsM * 16, warp_token = warp / kWarpsM * kWarpTokens;
    for (int unit = 0; unit < count;) {
      const Sequence sequence = shared.reading.sequence;
      int tile = shared.reading.tile;
      const int end = min(unit + shared.reading.range.end - tile, count);
      const TileRows<Kind> rows = tile_rows();
      const int num_rows = live_rows(), last_row = rows.first_row + num_rows - 1;
      // What all rows see.
      const int all_end = sequence.context() + rows.first_row / list.group + 1;
      const int all_begin = sequence.context() + last_row / list.group + 1 - list.window;
      const Visible tokens = visible(sequence, rows.first_row + warp_row + lane_index() / 4);
      const float factor = score_factor(rows.kv_head);
      // A factor of zero would make NaN of what is hidden.
      const ScoreScale scale = {fmaxf(fabsf(factor), 1e-30f), call.softcap * kLog2E};

      load_queries(rows, num_rows, factor < 0.0f);
      __syncthreads();
      Warp own;
      own.begin(shared_address(query_tile()), warp_row);
      for (; unit < end; ++unit, ++tile) {
        const Lookup next = look_up(unit + kNumStages);
        wait_async_copies<kNumStages - 2>();
        __syncthreads();  // the unit has landed for all, and all are done with the one before
        if (unit + kNumStages - 1 < count) ring.copy(call, unit + kNumStages - 1);
        commit_async_copies();
        const int token = tile * BLOCK_N;
        const bool hides = token + BLOCK_N > all_end || (Kind::kWindow && token < all_begin);
        own.attend(ring.tile(stages, unit, 0), ring.tile(stages, unit, 1), warp_token,
                   token + warp_token, hides, tokens, scale);
        ring.tell(call, unit + kNumStages, next);
      }
      own.softmax.end();
      // The stage that was read last is free until the next unit.
      finish(own, reinterpret_cast<float*>(stages + (unit - 1) % kNumStages * Ring::kStageBytes));
      if (threadIdx.x == 0 && unit < count) {
        shared.first_unit += shared.reading.range.size();
        shared.reading.next_row_tile(list);
      }
      __syncthreads();
    }
    wait_async_copies<0>();
  }
};

template <typename Kind, int BLOCK_M, int BLOCK_N, int kNumWarps, int kNumStages, int kBlocksPerSm>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads, kBlocksPerSm)
    paged_attn_split(const typename Kind::T* q, const typename Kind::Cached* k_cache,
                     const typename Kind::Cached* v_cache, const int* block_table,
                     const int* kv_lens, const int* cu_q, const float* sinks, const float* k_scale,
                     const float* v_scale, const float8_e4m3fn* k_block_scale,
                     const float8_e4m3fn* v_block_scale, typename Kind::T* out, float* lse,
                     float* partials, uint32_t* counters, int batch, int heads, int kv_heads,
                     int table_width, int window, float sm_scale, float softcap) {
  using Kernel = SplitAttention<Kind, BLOCK_M, BLOCK_N, kNumWarps, kNumStages>;
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ typename Kernel::Shared shared;
  const Attention<Kind> call = {q,        k_cache, v_cache, block_table,   kv_lens,       cu_q,
                                sinks,    k_scale, v_scale, k_block_scale, v_block_scale, out,
                                lse,      batch,   heads,   kv_heads,      table_width,   window,
                                sm_scale, softcap};
  Kernel{call,
         {partials, counters},
         {kv_lens, cu_q, batch, kv_heads, call.group(), window},
         stages,
         shared}
      .run();
}

}  // namespace kernelcat
