// What the kernel of decoded weights fixes at compile time, its shared memory, and its producer.
#pragma once

#include <kernelcat/expert_weights.cuh>
#include <kernelcat/fp4_operand.cuh>

#include "producer.cuh"

namespace kernelcat {

// What is tiled is D^T = W A^T: BLOCK_N rows of W by BLOCK_M rows of one expert. A stage has 128
// columns of k: two swizzled boxes of 64 columns of A, and the weights as they are in memory. With
// kGather the rows of A are tokens.
//
// An SM runs one thread block of a producer warpgroup and two consumer warpgroups (three for 192
// rows of W), or, where an expert has few rows, three thread blocks of one consumer warpgroup and
// one producer warp: their sums need few registers, and while one thread block waits or stores, the
// others decode. With kScaled, A has a scale for each row and 128 columns.
template <typename T_, WeightFormat kFormat_, int BLOCK_M_, int BLOCK_N_, int kNumStages_,
          Gating kGating_, bool kGather_, bool kScaled_>
struct DecodedConfig {
  using T = T_;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr bool kNvfp4 = kFormat == WeightFormat::kNvfp4;
  static constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, BLOCK_K = 128;
  static constexpr int kNumStages = kNumStages_;
  static constexpr Gating kGating = kGating_;
  static constexpr bool kGather = kGather_, kScaled = kScaled_;

  static constexpr int kBlocksPerSm = BLOCK_M < 64 && BLOCK_N == 128 ? 3 : 1;
  static constexpr int kNumConsumers = kBlocksPerSm > 1 ? 1 : BLOCK_N == 192 ? 3 : 2;
  static constexpr int kNumProducers = kBlocksPerSm == 1 ? kWarpgroupThreads : kWarpThreads;
  static constexpr int kNumThreads = kNumConsumers * kWarpgroupThreads + kNumProducers;
  // They copy rows of A, scales of rows, or, one thread, the scale of float8 weights.
  static constexpr int kCopyingThreads = kGather || kScaled ? kNumProducers : kIsFp8 ? 1 : 0;
  // Of a thread, if warpgroups exchange registers. To gather more rows takes more of them.
  static constexpr bool kGathersFew = BLOCK_M == 48 || BLOCK_M == 96;
  static constexpr int kGatherRegisters = kGathersFew ? 56 : BLOCK_M > 128 ? 88 : 72;
  static constexpr int kProducerRegisters = kGather ? kGatherRegisters : BLOCK_M == 256 ? 24 : 40;
  static constexpr int kConsumerRegisters = kNumConsumers == 3 ? (kGather ? 144 : 152)
                                            : kGather          ? 252 - kGatherRegisters / 2
                                            : BLOCK_M == 256   ? 240
                                                               : 232;

  // The kernel starts with 168 registers of each of 384 threads, or with 128 of each of 512. If
  // warpgroups wanted more than these in all, setmaxnreg would wait forever.
  static constexpr int kRegisters = kNumConsumers == 3 ? 128 : 168;
  static_assert(kBlocksPerSm > 1 || kNumConsumers * kConsumerRegisters + kProducerRegisters <=
                                        (kNumConsumers + 1) * kRegisters);

  static constexpr bool kGathersByOffset = false;  // see GatheredRows

  static constexpr int kStageTiles = BLOCK_K / kTileCols;
  static constexpr int kTileRowsOfW = BLOCK_N / kTileRows;
  static constexpr int kRowBlocks = BLOCK_N / kWgmmaM / kNumConsumers;  // of a consumer warpgroup
  static constexpr int kBoxBytes = BLOCK_M * kRowBytes;
  static constexpr int kScaleBytes = kTileScales<kNvfp4>;

  static_assert(BLOCK_N == 128 || (!kScaled && (kIsFp8 ? BLOCK_N == 256 : BLOCK_M == 128)),
                "sums and products fit into registers");
  static_assert(!kScaled || kNumProducers == kWarpgroupThreads, "a warpgroup copies scales");

  using Tiles = ExpertTiles<BLOCK_M, BLOCK_N>;
  using Sums = float[kRowBlocks][BLOCK_M / 2];
};

// The weights of a stage: tile rows of two tiles with their scales, or rows of float8, whose
// 128 bytes are swizzled and of which 128 share a scale (DecodedShared::scales).
template <typename Config, bool kIsFp8 = Config::kIsFp8>
struct StageWeights {
  uint8_t codes[Config::kTileRowsOfW][Config::kStageTiles][kTileCodes];
  uint8_t scales[Config::kTileRowsOfW][Config::kStageTiles][Config::kScaleBytes];
};
template <typename Config>
struct StageWeights<Config, true> {
  alignas(1024) uint8_t rows[Config::BLOCK_N][Config::BLOCK_K];
};

template <typename Config>
struct DecodedStage {
  alignas(1024) uint8_t a[Config::kStageTiles][Config::kBoxBytes];
  StageWeights<Config> w;
};

template <typename Config>
struct DecodedShared {
  DecodedStage<Config> stages[Config::kNumStages];
  // Those of A with kScaled; those of float8 weights are b, one for 128 rows.
  StageScales<Config::kScaled ? Config::BLOCK_M : 2>
      scales[Config::kScaled || Config::kIsFp8 ? Config::kNumStages : 1];
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];

  // The lists of ExpertTiles, 2 * (experts + 1) numbers, follow the barriers.
  __device__ __forceinline__ int* lists() {
    return reinterpret_cast<int*>(empty + Config::kNumStages);
  }
};

// The tensor maps. What lies outside of a tensor is loaded as zeros. A tile row of packed codes or
// of their scales is a row of 32-bit words, loaded in boxes of BLOCK_N / 16 tile rows x 2 tiles.
struct DecodedMaps {
  const TensorMap& a;       // (rows, k), boxes BLOCK_M x 64; read without kGather
  const TensorMap& w;       // (experts' tile rows, words); float8: (experts * n, k), BLOCK_N x 128
  const TensorMap& scales;  // (experts' tile rows, words); not read for float8

  template <typename Config>
  __device__ __forceinline__ void prefetch() const {
    if constexpr (!Config::kGather) prefetch_map(a);
    prefetch_map(w);
    if constexpr (!Config::kIsFp8) prefetch_map(scales);
  }

  // Starts to load the weights of k-block `k_block`, for rows of W from `col` of the expert on,
  // which has `n` rows.
  template <typename Config>
  __device__ __forceinline__ void load(StageWeights<Config>& stage, int expert, int col, int n,
                                       int k_block, Barrier& full) const {
    if constexpr (Config::kIsFp8) {
      tensor_load(stage.rows, w, k_block * Config::BLOCK_K, expert * n + col, full, kDefaultPolicy);
    } else {
      constexpr int kWord = sizeof(uint32_t);
      const int column = k_block * Config::kStageTiles;  // of tiles
      const int tile_row = expert * ceil_div(n, kTileRows) + col / kTileRows;
      tensor_load(stage.codes, w, column * (kTileCodes / kWord), tile_row, full, kDefaultPolicy);
      tensor_load(stage.scales, scales, column * (Config::kScaleBytes / kWord), tile_row, full,
                  kDefaultPolicy);
    }
  }
};

// Runs in the kCopyingThreads, or in one warp if there are fewer. An expert has `n` rows of W.
template <typename Config>
__device__ __forceinline__ void produce_encoded(DecodedShared<Config>& shared,
                                                const typename Config::Tiles& tiles,
                                                const DecodedMaps& maps, const CopySource& source,
                                                int n, int num_k) {
  using Stage = DecodedStage<Config>;
  constexpr int kTiles = Config::kStageTiles;
  constexpr int kTmaBytes = sizeof(StageWeights<Config>) + (Config::kGather ? 0 : sizeof(Stage::a));
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  PipelineState<Config::kNumStages> position;
  tiles.for_each([&](const ExpertTile& tile) {
    const GatheredRows<Config> rows(source, tile);
    const CopiedScales<Config> scales(source, tile);
    const float* w_scales = nullptr;  // of float8: (num_k,)
    if constexpr (Config::kIsFp8) {
      const int64_t row = static_cast<int64_t>(tile.expert) * source.scales.num_n;
      w_scales = source.scales.b_scale + (row + tile.col / kScaleBlock) * num_k;
    }
    for (int k_block = 0; k_block < num_k; ++k_block) {
      Stage& stage = shared.stages[position.stage];
      Barrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase ^ 1);
      if (is_leader) {
        full.arrive_expect(kTmaBytes);
        maps.load<Config>(stage.w, tile.expert, tile.col, n, k_block, full);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int column = k_block * kTiles + i;  // of boxes
        if constexpr (Config::kGather) {
          rows.load(stage.a[i], source, column);
        } else if (is_leader) {
          tensor_load(stage.a[i], maps.a, column * kTileCols, tile.row, full, kDefaultPolicy);
        }
      }
      scales.load(shared.scales[Config::kScaled ? position.stage : 0], source, k_block);
      if constexpr (Config::kIsFp8) {
        float* target = shared.scales[position.stage].b;
        if (is_leader) async_copy_4(target, w_scales + k_block, true);
        if constexpr (Config::BLOCK_N > kScaleBlock) {
          const bool is_inside = tile.col + kScaleBlock < n;
          const float* second = w_scales + (is_inside ? num_k : 0) + k_block;
          if (is_leader) async_copy_4(target + 1, second, is_inside);
        }
      }
      if constexpr (Config::kCopyingThreads > 0) {
        if (Config::kCopyingThreads > 1 || is_leader) arrive_when_copied(full);
      }
      position.advance();
    }
  });
}

}  // namespace kernelcat
