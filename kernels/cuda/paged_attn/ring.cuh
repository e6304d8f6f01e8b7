// The ring of shared-memory stages that keys and values go through. A unit's way has three steps,
// so that no load waits for another: its tokens are looked up in the block table (into registers,
// while an earlier unit is multiplied), their rows are told to the block, and a unit later copied.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/mbarrier.cuh>

#include "schedule.cuh"
#include "tiles.cuh"

namespace kernelcat {

// 4, 8 or 16 bytes.
template <int kBytes>
__device__ __forceinline__ void async_copy(uint32_t shared_address, const void* global,
                                           bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address), "l"(global),
               "n"(kBytes), "r"(valid ? kBytes : 0)
               : "memory");
}

constexpr int kUnread = -1;

// Where a thread's token of a unit is: its page (kUnread: nobody sees the token) and place in it.
struct Lookup {
  int page = kUnread, slot = 0, head = 0;
};

template <typename Kind, int BLOCK_N, int kThreads, int kNumStages>
struct CacheRing {
  using Tile = CacheTile<Kind>;
  using Cached = typename Kind::Cached;
  static constexpr bool kPageScales = Kind::kScales == Scales::kPage;
  static constexpr int kTileBytes = BLOCK_N * Kind::kRowBytes;
  static constexpr int kScaleBytes = kPageScales ? BLOCK_N * 4 : 0;
  static constexpr int kBlockScales =
      kIsNvfp4<Cached> ? Kind::kHeadDim / kScaledValues : 0;  // of a token
  static constexpr int kBlockScaleBytes = BLOCK_N * kBlockScales;
  // K, V, their scales, their block scales.
  static constexpr int kStageBytes = 2 * (kTileBytes + kScaleBytes + kBlockScaleBytes);
  static constexpr int kCopies = BLOCK_N * Tile::kUnits / kThreads;  // of K, by each thread
  static_assert(BLOCK_N <= kThreads && BLOCK_N * Tile::kUnits % kThreads == 0);

  // What a copy needs to know of the tokens of a stage's next unit.
  struct Rows {
    int64_t row[BLOCK_N];  // of head_dim elements; kUnread
    int scale[kPageScales ? BLOCK_N : 1];
  };

  uint32_t stages;  // shared-memory address
  Rows* rows;       // a stage each, in shared memory

  __device__ __forceinline__ uint32_t stage(int unit) const {
    return stages + unit % kNumStages * kStageBytes;
  }

  template <typename List>
  static __device__ __forceinline__ Lookup look_up(const Attention<Kind>& call,
                                                   const Cursor<List>& cursor) {
    Lookup found;
    const int token = cursor.tile * BLOCK_N + threadIdx.x;
    if (threadIdx.x < BLOCK_N && token >= cursor.range.first_token &&
        token < cursor.range.end_token) {
      const int64_t first = static_cast<int64_t>(cursor.index) * call.table_width;
      found.page = __ldg(call.block_table + first + token / Kind::kPageSize);
      found.slot = token % Kind::kPageSize;
    }
    found.head = cursor.head;
    return found;
  }

  __device__ __forceinline__ void tell(const Attention<Kind>& call, int unit, Lookup found) const {
    if (threadIdx.x >= BLOCK_N) return;
    Rows& told = rows[unit % kNumStages];
    const bool read = found.page != kUnread;
    const int64_t row = static_cast<int64_t>(found.page) * Kind::kPageSize + found.slot;
    told.row[threadIdx.x] = read ? row * call.kv_heads + found.head : kUnread;
    if constexpr (kPageScales) told.scale[threadIdx.x] = found.page * call.kv_heads + found.head;
  }

  // Starts the copies of a unit that was told before the block's last barrier.
  __device__ __forceinline__ void copy(const Attention<Kind>& call, int unit) const {
    const Rows& told = rows[unit % kNumStages];
    const uint32_t keys = stage(unit), values = keys + kTileBytes;
#pragma unroll 8  // more would take registers that the sums need
    for (int i = 0; i < kCopies; ++i) {
      const int index = threadIdx.x + i * kThreads;
      const int token = index / Tile::kUnits, column = index % Tile::kUnits;
      const int64_t row = told.row[token];
      const int64_t offset = row == kUnread ? 0 : row * Kind::kRowBytes + column * 16;
      const uint32_t place = place_in_tile<Tile::kUnits>(token, column);
      async_copy_16(keys + place, reinterpret_cast<const uint8_t*>(call.k_cache) + offset,
                    row != kUnread);
      async_copy_16(values + place, reinterpret_cast<const uint8_t*>(call.v_cache) + offset,
                    row != kUnread);
    }
    if constexpr (kPageScales) {
      if (threadIdx.x < BLOCK_N) {
        const bool read = told.row[threadIdx.x] != kUnread;
        const int scale = read ? told.scale[threadIdx.x] : 0;
        const uint32_t place = stage(unit) + 2 * kTileBytes + threadIdx.x * 4;
        async_copy<4>(place, call.k_scale + scale, read);
        async_copy<4>(place + kScaleBytes, call.v_scale + scale, read);
      }
    }
    if constexpr (kIsNvfp4<Cached>) {
      if (threadIdx.x < BLOCK_N) {
        const int64_t row = told.row[threadIdx.x];
        const int64_t offset = row == kUnread ? 0 : row * kBlockScales;
        const uint32_t place =
            stage(unit) + 2 * (kTileBytes + kScaleBytes) + threadIdx.x * kBlockScales;
        async_copy<kBlockScales>(place, call.k_block_scale + offset, row != kUnread);
        async_copy<kBlockScales>(place + kBlockScaleBytes, call.v_block_scale + offset,
                                 row != kUnread);
      }
    }
  }

  // Keys (0) or values (1) of a unit; `memory` is what lies at `stages`.
  __device__ __forceinline__ ScaledTile tile(const uint8_t* memory, int unit, int which) const {
    const uint8_t* scales = memory + unit % kNumStages * kStageBytes + 2 * kTileBytes;
    return {stage(unit) + which * kTileBytes,
            reinterpret_cast<const float*>(scales + which * kScaleBytes),
            scales + 2 * kScaleBytes + which * kBlockScaleBytes};
  }
};

}  // namespace kernelcat
