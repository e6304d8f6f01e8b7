// The producer warpgroup: weights come by TMA, rows of A by TMA or, gathered, by cp.async.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/copy_arrival.cuh>

#include "wgmma_tile.cuh"

namespace kernelcat {

constexpr int kVectorBytes = 16;
constexpr int kRowVectors = kRowBytes / kVectorBytes;  // of a row of a stage

// A in global memory.
struct GatherSource {
  const uint4* a;    // (tokens, row_vectors)
  const int* order;  // (tokens * top_k,)
  uint32_t top_k;
  int row_vectors;  // vectors of 16 bytes in a row of A
};

// The rows of a tile that this thread gathers, and its vector of each row of a stage. The eight
// lanes that copy a row's 128 bytes are neighbours.
template <int BLOCK_M>
struct GatheredRows {
  static constexpr int kStep = kWarpgroupThreads / kRowVectors;  // rows that are copied at once
  static constexpr int kCount = BLOCK_M / kStep;

  int rows[kCount];  // tokens, or -1 outside the expert

  __device__ __forceinline__ GatheredRows(const GatherSource& source, const ExpertTile& tile) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = threadIdx.x % kWarpgroupThreads / kRowVectors + i * kStep;
      rows[i] = -1;
      if (row < tile.num_rows) {
        rows[i] = static_cast<uint32_t>(source.order[tile.row + row]) / source.top_k;
      }
    }
  }

  // Starts to copy k-block `k_block` to `stage`, in the 128-byte swizzle of TMA. Rows outside the
  // expert and columns outside A become zeros.
  __device__ __forceinline__ void load(uint8_t* stage, const GatherSource& source,
                                       int k_block) const {
    const int first = threadIdx.x % kWarpgroupThreads, vector = first % kRowVectors;
    const int column = k_block * kRowVectors + vector;
    const uint32_t target = shared_address(stage) + swizzled<kRowBytes>(first * kVectorBytes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool is_inside = rows[i] >= 0 && column < source.row_vectors;
      const int64_t offset = static_cast<int64_t>(rows[i]) * source.row_vectors + column;
      async_copy_16(target + i * kStep * kRowBytes, source.a + (is_inside ? offset : 0), is_inside);
    }
  }
};

// Runs in a whole warpgroup with kGather, else in one warp.
template <typename Config>
__device__ __forceinline__ void produce(ExpertShared<Config>& shared,
                                        const typename Config::Tiles& tiles, const TensorMap& map_a,
                                        const TensorMap& map_w, const GatherSource& source, int n,
                                        int num_k) {
  constexpr int kTmaBytes = Config::kGather ? Config::kStageBytesW : Config::kStageBytes;
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  PipelineState<Config::kNumStages> position;
  tiles.for_each([&](const ExpertTile& tile) {
    const int row_of_w = tile.expert * n + tile.col;
    const auto load = [&](const auto& load_a) {
      for (int k_block = 0; k_block < num_k; ++k_block) {
        uint8_t* stage = shared.stages[position.stage];
        Barrier& full = shared.full[position.stage];
        shared.empty[position.stage].wait(position.phase ^ 1);
        if (is_leader) {
          full.arrive_expect(kTmaBytes);
          tensor_load(stage + Config::kStageBytesA, map_w, k_block * Config::BLOCK_K, row_of_w,
                      full, kDefaultPolicy);
        }
        load_a(stage, k_block, full);
        position.advance();
      }
    };
    if constexpr (Config::kGather) {
      const GatheredRows<Config::BLOCK_M> rows(source, tile);
      load([&](uint8_t* stage, int k_block, Barrier& full) {
        rows.load(stage, source, k_block);
        arrive_when_copied(full);
      });
    } else {
      load([&](uint8_t* stage, int k_block, Barrier& full) {
        if (is_leader) {
          tensor_load(stage, map_a, k_block * Config::BLOCK_K, tile.row, full, kDefaultPolicy);
        }
      });
    }
  });
}

}  // namespace kernelcat
