// The wgmma kernel's compile-time configuration, its shared memory, and its producer.
#pragma once

#include <kernelcat/block_schedule.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/fp4_operand.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/wgmma_rs.cuh>

#include "sum_inbox.cuh"

namespace kernelcat {

// What is tiled is D^T = W A^T: 128 rows of W, 64 for each of two consumer warpgroups, by BLOCK_N
// rows of A. A stage has 128 columns of k: two swizzled boxes of 64 columns of A, and for each of
// the eight tile rows of W two tiles with their scales. The kSplitK thread blocks of a cluster
// split a tile's k range. With kSplitK > 1 a cluster computes only one tile.
template <typename T_, typename TOut, bool kNvfp4_, Activation kActivation, bool kRowScale,
          int BLOCK_N_, int kNumStages_, int kSplitK_>
struct Fp4WgmmaTile {
  using T = T_;
  using Output = Fp4Output<TOut, kActivation, kRowScale>;
  static constexpr bool kNvfp4 = kNvfp4_;
  static constexpr int BLOCK_M = 128, BLOCK_N = BLOCK_N_, BLOCK_K = 128;
  static constexpr int kNumStages = kNumStages_, kSplitK = kSplitK_;
  // For BlockSchedule: its splits and cluster tiles are not used, because a cluster splits k.
  static constexpr bool kSplit = false, kSwap = true;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterSize = kSplitK;
  static constexpr int kNumConsumers = 2, kNumThreads = 3 * kWarpgroupThreads;
  static constexpr int kRegisters = BLOCK_N == 256 ? 240 : 232;
  static constexpr int kProducerRegisters = BLOCK_N == 256 ? 24 : 40;

  static constexpr int kStageTiles = BLOCK_K / kTileCols;
  static constexpr int kTileRowsOfW = BLOCK_M / kTileRows;
  static constexpr int kBoxBytes = BLOCK_N * kRowBytes;
  static constexpr int kScaleBytes = kTileScales<kNvfp4>;
  using Sums = float[BLOCK_N / 2];
};

template <typename Config>
struct Fp4WgmmaStage {
  alignas(1024) uint8_t a[Config::kStageTiles][Config::kBoxBytes];
  uint8_t codes[Config::kTileRowsOfW][Config::kStageTiles][kTileCodes];
  uint8_t scales[Config::kTileRowsOfW][Config::kStageTiles][Config::kScaleBytes];
};

template <typename Config>
struct Fp4WgmmaShared {
  Fp4WgmmaStage<Config> stages[Config::kNumStages];
  SumInbox<Config> inboxes[Config::kNumConsumers];
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];
};

// K-blocks [begin, end) of a tile: those that a thread block of the cluster multiplies.
template <typename Config>
struct KRange {
  int begin, end;

  __device__ __forceinline__ KRange(const WorkItem& work, int rank)
      : begin(work.k_end * rank / Config::kSplitK),
        end(work.k_end * (rank + 1) / Config::kSplitK) {}
};

// The tensor maps: rows of A, and the codes and scales of W, of which a tile row is a row of 32-bit
// words. What lies outside of a tensor is loaded as zeros.
struct Fp4Maps {
  const TensorMap& a;       // (m, k), boxes BLOCK_N x 64
  const TensorMap& w;       // (tile rows, words of codes), boxes of 8 tile rows x 2 tiles
  const TensorMap& scales;  // (tile rows, words of scales), boxes of 8 tile rows x 2 tiles

  __device__ __forceinline__ void prefetch() const {
    prefetch_map(a);
    prefetch_map(w);
    prefetch_map(scales);
  }
};

// The producer; runs in one thread.
template <typename Config>
__device__ __forceinline__ void produce(Fp4WgmmaShared<Config>& shared,
                                        const BlockSchedule<Config>& schedule,
                                        const Fp4Maps& maps) {
  constexpr int kTiles = Config::kStageTiles, kWord = sizeof(uint32_t);
  PipelineState<Config::kNumStages> position;
  schedule.for_each([&](const WorkItem& work, int first_row, int first_col) {
    const int tile_row = first_row / kTileRows;
    const KRange<Config> range(work, schedule.rank);
    for (int k_block = range.begin; k_block < range.end; ++k_block) {
      Fp4WgmmaStage<Config>& stage = shared.stages[position.stage];
      Barrier& full = shared.full[position.stage];
      const int tile = k_block * kTiles;
      shared.empty[position.stage].wait(position.phase ^ 1);
      full.arrive_expect(sizeof(stage.a) + sizeof(stage.codes) + sizeof(stage.scales));
      tensor_load(stage.codes, maps.w, tile * (kTileCodes / kWord), tile_row, full, kDefaultPolicy);
      tensor_load(stage.scales, maps.scales, tile * (Config::kScaleBytes / kWord), tile_row, full,
                  kDefaultPolicy);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        tensor_load(stage.a[i], maps.a, (tile + i) * kTileCols, first_col, full, kDefaultPolicy);
      }
      position.advance();
    }
  });
  launch_dependents();
}

}  // namespace kernelcat
