// What the kernel of packed weights fixes at compile time, its shared memory, and its producer.
#pragma once

#include <kernelcat/fp4_operand.cuh>

#include "producer.cuh"

namespace kernelcat {

// What is tiled is D^T = W A^T: BLOCK_N rows of W by BLOCK_M rows of one expert. A stage has 128
// columns of k: two swizzled boxes of 64 columns of A, and for each of the eight tile rows of W two
// tiles with their scales. With kGather the rows of A are tokens.
//
// An SM runs one thread block of two consumer warpgroups and a producer warpgroup, or, where an
// expert has few rows, three thread blocks of one consumer warpgroup and one producer warp: their
// sums need few registers, and while one thread block waits or stores, the others decode.
template <typename T_, bool kNvfp4_, int BLOCK_M_, int kNumStages_, Gating kGating_, bool kGather_>
struct PackedConfig {
  using T = T_;
  static constexpr bool kNvfp4 = kNvfp4_;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = 128, BLOCK_K = 128;
  static constexpr int kNumStages = kNumStages_;
  static constexpr Gating kGating = kGating_;
  static constexpr bool kGather = kGather_;

  static constexpr int kBlocksPerSm = BLOCK_M < 64 ? 3 : 1;
  static constexpr int kNumConsumers = kBlocksPerSm == 1 ? 2 : 1;
  static constexpr int kNumProducers = kBlocksPerSm == 1 ? kWarpgroupThreads : kWarpThreads;
  static constexpr int kNumThreads = kNumConsumers * kWarpgroupThreads + kNumProducers;
  static constexpr int kCopyingThreads = kGather ? kNumProducers : 0;
  // Of a thread, if warpgroups exchange registers.
  static constexpr int kProducerRegisters = kGather ? 72 : BLOCK_M == 256 ? 24 : 40;
  static constexpr int kConsumerRegisters = kGather ? 216 : BLOCK_M == 256 ? 240 : 232;

  static constexpr int kStageTiles = BLOCK_K / kTileCols;
  static constexpr int kTileRowsOfW = BLOCK_N / kTileRows;
  static constexpr int kRowBlocks = BLOCK_N / kWgmmaM / kNumConsumers;  // of a consumer warpgroup
  static constexpr int kBoxBytes = BLOCK_M * kRowBytes;
  static constexpr int kScaleBytes = kTileScales<kNvfp4>;

  using Tiles = ExpertTiles<BLOCK_M, BLOCK_N>;
  using Sums = float[kRowBlocks][BLOCK_M / 2];
};

template <typename Config>
struct PackedStage {
  alignas(1024) uint8_t a[Config::kStageTiles][Config::kBoxBytes];
  uint8_t codes[Config::kTileRowsOfW][Config::kStageTiles][kTileCodes];
  uint8_t scales[Config::kTileRowsOfW][Config::kStageTiles][Config::kScaleBytes];
};

template <typename Config>
struct PackedShared {
  PackedStage<Config> stages[Config::kNumStages];
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];

  // The lists of ExpertTiles, 2 * (experts + 1) numbers, follow the barriers.
  __device__ __forceinline__ int* lists() {
    return reinterpret_cast<int*>(empty + Config::kNumStages);
  }
};

// The tensor maps: rows of A, and the codes and scales of all experts' W, of which a tile row is a
// row of 32-bit words. What lies outside of a tensor is loaded as zeros.
struct PackedMaps {
  const TensorMap& a;       // (rows, k), boxes BLOCK_M x 64; read without kGather
  const TensorMap& w;       // (experts' tile rows, words of codes), boxes of 8 tile rows x 2 tiles
  const TensorMap& scales;  // (experts' tile rows, words of scales), boxes of 8 tile rows x 2 tiles

  template <bool kGather>
  __device__ __forceinline__ void prefetch() const {
    if constexpr (!kGather) prefetch_map(a);
    prefetch_map(w);
    prefetch_map(scales);
  }
};

// Runs in the kCopyingThreads, or in one warp if there are none. An expert has `tile_rows` tile
// rows of W.
template <typename Config>
__device__ __forceinline__ void produce_packed(PackedShared<Config>& shared,
                                               const typename Config::Tiles& tiles,
                                               const PackedMaps& maps, const CopySource& source,
                                               int tile_rows, int num_k) {
  using Stage = PackedStage<Config>;
  constexpr int kTiles = Config::kStageTiles, kWord = sizeof(uint32_t);
  constexpr int kTmaBytes =
      sizeof(Stage::codes) + sizeof(Stage::scales) + (Config::kGather ? 0 : sizeof(Stage::a));
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  PipelineState<Config::kNumStages> position;
  tiles.for_each([&](const ExpertTile& tile) {
    const int tile_row = tile.expert * tile_rows + tile.col / kTileRows;
    const GatheredRows<Config> rows(source, tile);
    for (int k_block = 0; k_block < num_k; ++k_block) {
      Stage& stage = shared.stages[position.stage];
      Barrier& full = shared.full[position.stage];
      const int column = k_block * kTiles;  // of tiles
      shared.empty[position.stage].wait(position.phase ^ 1);
      if (is_leader) {
        full.arrive_expect(kTmaBytes);
        tensor_load(stage.codes, maps.w, column * (kTileCodes / kWord), tile_row, full,
                    kDefaultPolicy);
        tensor_load(stage.scales, maps.scales, column * (Config::kScaleBytes / kWord), tile_row,
                    full, kDefaultPolicy);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if constexpr (Config::kGather) {
          rows.load(stage.a[i], source, column + i);
        } else if (is_leader) {
          tensor_load(stage.a[i], maps.a, (column + i) * kTileCols, tile.row, full, kDefaultPolicy);
        }
      }
      if constexpr (Config::kGather) arrive_when_copied(full);
      position.advance();
    }
  });
}

}  // namespace kernelcat
