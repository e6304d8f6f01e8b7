// The ring of stages through which keys and values come into shared memory by cp.async.
//
// No load waits for another because a KV tile takes three steps, each one tile apart: every thread
// looks a token up in the block table (into registers, while an earlier tile is multiplied), writes
// the token's row into shared memory, and copies its part of all rows.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/async_copy_small.cuh>
#include <kernelcat/mbarrier.cuh>

#include "tiles.cuh"
#include "work_list.cuh"

namespace kernelcat {

constexpr int kUnread = -1;  // the page, or row, of a token that no row of the tile sees

// Where the thread's token of a KV tile lies in the cache.
struct TokenPlace {
  int page = kUnread, slot = 0, kv_head = 0;
};

// `item` counts the KV tiles of the thread block.
template <typename Kind, int BLOCK_N, int kThreads, int kNumStages>
struct CacheRing {
  using Operands = KvOperands<Kind>;
  using Cached = typename Kind::Cached;
  static constexpr bool kPageScales = Kind::kScales == Scales::kPage;
  static constexpr int kTileBytes = BLOCK_N * Kind::kRowBytes;
  static constexpr int kScaleBytes = kPageScales ? BLOCK_N * 4 : 0;
  static constexpr int kTokenBlockScales = kIsNvfp4<Cached> ? Kind::kHeadDim / kNvfp4Block : 0;
  static constexpr int kBlockScaleBytes = BLOCK_N * kTokenBlockScales;
  // A stage: keys, values, scales of both, block scales of both.
  static constexpr int kStageBytes = 2 * (kTileBytes + kScaleBytes + kBlockScaleBytes);
  static constexpr int kCopies = BLOCK_N * Operands::kUnits / kThreads;  // of keys, by each thread
  static_assert(BLOCK_N <= kThreads && BLOCK_N * Operands::kUnits % kThreads == 0);

  // The source of each token of a stage.
  struct Rows {
    int64_t row[BLOCK_N];                  // of a cache seen as (rows, head_dim), or kUnread
    int scale[kPageScales ? BLOCK_N : 1];  // index into k_scale and v_scale
  };

  uint32_t stages;  // shared-memory address
  Rows* rows;       // (kNumStages,), in shared memory

  __device__ __forceinline__ uint32_t stage(int item) const {
    return stages + item % kNumStages * kStageBytes;
  }

  template <typename List>
  static __device__ __forceinline__ TokenPlace look_up(const AttentionArgs<Kind>& args,
                                                       const WorkCursor<List>& cursor) {
    TokenPlace place;
    const int token = cursor.kv_tile * BLOCK_N + threadIdx.x;
    if (threadIdx.x < BLOCK_N && token >= cursor.range.first_token &&
        token < cursor.range.end_token) {
      const int64_t first = static_cast<int64_t>(cursor.sequence_idx) * args.table_width;
      place.page = __ldg(args.block_table + first + token / Kind::kPageSize);
      place.slot = token % Kind::kPageSize;
    }
    place.kv_head = cursor.kv_head;
    return place;
  }

  // Writes the row of the thread's token into shared memory.
  __device__ __forceinline__ void write_row(const AttentionArgs<Kind>& args, int item,
                                            TokenPlace place) const {
    if (threadIdx.x >= BLOCK_N) return;
    Rows& stage_rows = rows[item % kNumStages];
    const bool is_read = place.page != kUnread;
    const int64_t row = static_cast<int64_t>(place.page) * Kind::kPageSize + place.slot;
    stage_rows.row[threadIdx.x] = is_read ? row * args.kv_heads + place.kv_head : kUnread;
    if constexpr (kPageScales) {
      stage_rows.scale[threadIdx.x] = place.page * args.kv_heads + place.kv_head;
    }
  }

  // Starts the copies of a KV tile whose rows were written before the last __syncthreads().
  __device__ __forceinline__ void copy(const AttentionArgs<Kind>& args, int item) const {
    const Rows& stage_rows = rows[item % kNumStages];
    const uint32_t keys = stage(item), values = keys + kTileBytes;
#pragma unroll 8  // more would take registers that the accumulators need
    for (int i = 0; i < kCopies; ++i) {
      const int index = threadIdx.x + i * kThreads;
      const int token = index / Operands::kUnits, unit = index % Operands::kUnits;
      const int64_t row = stage_rows.row[token];
      const int64_t source = row == kUnread ? 0 : row * Kind::kRowBytes + unit * 16;
      const uint32_t target = swizzled_offset<Operands::kUnits>(token, unit);
      async_copy_16(keys + target, reinterpret_cast<const uint8_t*>(args.k_cache) + source,
                    row != kUnread);
      async_copy_16(values + target, reinterpret_cast<const uint8_t*>(args.v_cache) + source,
                    row != kUnread);
    }
    if constexpr (kPageScales) {
      if (threadIdx.x < BLOCK_N) copy_scales(args, stage(item), stage_rows);
    }
    if constexpr (kIsNvfp4<Cached>) {
      if (threadIdx.x < BLOCK_N) copy_block_scales(args, stage(item), stage_rows);
    }
  }

  // Keys (is_values = 0) or values (1) of a KV tile; `memory` is what lies at `stages`.
  __device__ __forceinline__ ScaledTile tile(const uint8_t* memory, int item, int is_values) const {
    const uint8_t* scales = memory + item % kNumStages * kStageBytes + 2 * kTileBytes;
    return {.address = stage(item) + is_values * kTileBytes,
            .scales = reinterpret_cast<const float*>(scales + is_values * kScaleBytes),
            .block_scales = scales + 2 * kScaleBytes + is_values * kBlockScaleBytes};
  }

 private:
  // The scales of the thread's token.
  static __device__ __forceinline__ void copy_scales(const AttentionArgs<Kind>& args,
                                                     uint32_t stage, const Rows& stage_rows) {
    const bool is_read = stage_rows.row[threadIdx.x] != kUnread;
    const int scale = is_read ? stage_rows.scale[threadIdx.x] : 0;
    const uint32_t target = stage + 2 * kTileBytes + threadIdx.x * 4;
    async_copy_small<4>(target, args.k_scale + scale, is_read);
    async_copy_small<4>(target + kScaleBytes, args.v_scale + scale, is_read);
  }

  static __device__ __forceinline__ void copy_block_scales(const AttentionArgs<Kind>& args,
                                                           uint32_t stage, const Rows& stage_rows) {
    const int64_t row = stage_rows.row[threadIdx.x];
    const int64_t source = row == kUnread ? 0 : row * kTokenBlockScales;
    const uint32_t target =
        stage + 2 * (kTileBytes + kScaleBytes) + threadIdx.x * kTokenBlockScales;
    async_copy_small<kTokenBlockScales>(target, args.k_block_scale + source, row != kUnread);
    async_copy_small<kTokenBlockScales>(target + kBlockScaleBytes, args.v_block_scale + source,
                                        row != kUnread);
  }
};

}  // namespace kernelcat
