// The wgmma kernel's choices at compile time, its shared memory, and how that is filled.
#pragma once

#include <kernelcat/block_schedule.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/pdl.cuh>

#include "decode.cuh"
#include "output.cuh"
#include "wgmma_weights.cuh"

namespace kernelcat {

// What is tiled is D^T = W A^T: 128 rows of W, two warpgroups of 64, by BLOCK_N rows of A. A stage
// has 128 columns: two boxes of 64 of A, swizzled, and of each of the eight tile rows of W two
// tiles with their scales. kSplit: some tiles are computed in pieces of their k range.
template <typename T_, typename TOut, bool kNvfp4_, Activation kActivation, bool kRowScale,
          int BLOCK_N_, int kNumStages_, bool kSplit_>
struct Fp4WgmmaTile {
  using T = T_;
  using Output = Fp4Output<TOut, kActivation, kRowScale>;
  static constexpr bool kNvfp4 = kNvfp4_, kSplit = kSplit_, kSwap = true;
  static constexpr int BLOCK_M = 128, BLOCK_N = BLOCK_N_, BLOCK_K = 128;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterSize = 1;  // for BlockSchedule
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
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];
  uint32_t is_last[Config::kNumConsumers];
};

// Runs in one warp, all of it: A comes by two boxes, W by a copy of a lane's own a tile row, and
// its scales by one of another lane's. Tiles and tile rows past the end of W are not copied.
template <typename Config>
__device__ __forceinline__ void produce(Fp4WgmmaShared<Config>& shared,
                                        const BlockSchedule<Config>& schedule,
                                        const TensorMap& map_a, const uint8_t* w,
                                        const uint8_t* w_scale, int n, int k) {
  constexpr int kRows = Config::kTileRowsOfW;
  const int lane = lane_index(), row = lane % kRows;
  const bool is_codes = lane < kRows, is_scales = !is_codes && lane < 2 * kRows;
  const int k_tiles = ceil_div(k, kTileCols), num_rows = ceil_div(n, kTileRows);
  const int tile_bytes = is_codes ? kTileCodes : Config::kScaleBytes;
  RingPosition<Config::kNumStages> position;
  schedule.for_each([&](const Work& work, int first_row, int first_col) {
    const int tile_row = first_row / kTileRows + row;
    const int live_rows = min(num_rows - first_row / kTileRows, kRows);
    const uint8_t* source =
        (is_codes ? w : w_scale) + static_cast<int64_t>(tile_row) * k_tiles * tile_bytes;
    for (int block = work.k_begin; block < work.k_end; ++block) {
      Fp4WgmmaStage<Config>& stage = shared.stages[position.stage];
      Barrier& full = shared.full[position.stage];
      const int tile = block * Config::kStageTiles;
      const int tiles = min(k_tiles - tile, Config::kStageTiles);
      shared.empty[position.stage].wait(position.parity ^ 1);
      if (lane == 0) {
        full.arrive_expect(Config::kStageTiles * Config::kBoxBytes +
                           live_rows * tiles * (kTileCodes + Config::kScaleBytes));
#pragma unroll
        for (int i = 0; i < Config::kStageTiles; ++i) {
          tensor_load(stage.a[i], map_a, (tile + i) * kTileCols, first_col, full, kDefaultPolicy);
        }
      }
      __syncwarp();
      if ((is_codes || is_scales) && row < live_rows) {
        uint8_t* target = is_codes ? stage.codes[row][0] : stage.scales[row][0];
        bulk_load(target, source + static_cast<int64_t>(tile) * tile_bytes, tiles * tile_bytes,
                  full, kDefaultPolicy);
      }
      position.advance();
    }
  });
  launch_dependents();
}

}  // namespace kernelcat
