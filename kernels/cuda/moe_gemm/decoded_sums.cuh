// The products of one tile by a consumer warpgroup, which decodes weights from shared memory to
// registers while the wgmmas of the weights before run.
#pragma once

#include <kernelcat/float8_tile.cuh>
#include <kernelcat/packed_tile.cuh>
#include <kernelcat/stage_release.cuh>

#include "decoded_stage.cuh"

namespace kernelcat {

// Waits until the stage of `position` is full.
template <typename Config>
__device__ __forceinline__ void wait_full(DecodedShared<Config>& shared,
                                          const PipelineState<Config::kNumStages>& position) {
  shared.full[position.stage].wait(position.phase);
  if constexpr (Config::kGather) fence_async_shared();  // cp.async wrote what wgmma reads
}

// The i-th tile of a warp in a stage, which must be full: row blocks of the same columns first.
template <typename Config>
__device__ __forceinline__ auto tile_of(const DecodedShared<Config>& shared, int stage, int i) {
  using T = typename Config::T;
  constexpr int kBlocks = Config::kRowBlocks, kWarpgroupWarps = 4;
  const int warp = threadIdx.x / kWarpThreads;
  const int first = warp / kWarpgroupWarps * kWarpgroupWarps * kBlocks + warp % kWarpgroupWarps;
  const int row = first + i % kBlocks * kWarpgroupWarps, col = i / kBlocks;  // of tiles
  const auto& w = shared.stages[stage].w;
  if constexpr (Config::kIsFp8) {
    return Float8Tile<T>(w.rows[row * kTileRows], col * kTileCols);
  } else {
    return PackedTile<T, Config::kNvfp4, true>(w.codes[row][col], w.scales[row][col]);
  }
}

// Multiplies packed 4-bit weights. A warp multiplies one tile of W after the other: first those of
// the same columns.
template <typename Config>
__device__ __forceinline__ void add_packed(DecodedShared<Config>& shared,
                                           PipelineState<Config::kNumStages>& position,
                                           typename Config::Sums& sums, int num_k) {
  constexpr int kBlocks = Config::kRowBlocks, kNumTiles = Config::kStageTiles * kBlocks;
  struct Tiles {
    decltype(tile_of<Config>(shared, 0, 0)) tiles[kNumTiles];
  };
  uint32_t operands[2][kTileSteps][4];
  const auto next = [&]() -> Tiles {
    wait_full(shared, position);
    Tiles result;
#pragma unroll
    for (int i = 0; i < kNumTiles; ++i) result.tiles[i] = tile_of(shared, position.stage, i);
    return result;
  };
  Tiles packed = next();
  int previous = 0;
  for (int k_block = 0; k_block < num_k; ++k_block) {
    const int stage = position.stage;
    position.advance();
#pragma unroll
    for (int i = 0; i < kNumTiles; ++i) {
      auto& decoded = operands[i % 2];
      packed.tiles[i].decode_into(decoded);
      const uint32_t a = shared_address(shared.stages[stage].a[i / kBlocks]);
      multiply_packed_tile<typename Config::T, Config::BLOCK_M>(
          sums[i % kBlocks], decoded, swizzled_rows_descriptor(a), i >= kBlocks || k_block > 0);
      if (i == kNumTiles - 1 && k_block + 1 < num_k) packed = next();
      wgmma_wait<1>();
      pin(operands[1 - i % 2]);
      if (i == 0 && k_block > 0) release_stage<1>(shared.empty[previous]);
    }
    previous = stage;
  }
  wgmma_wait<0>();
  pin(sums);
  release_stage<1>(shared.empty[previous]);
}

// Adds the products of a k-block to sums of a warp's rows of W by BLOCK_M rows of A: times `scale`,
// or with kScaled times the scales of the rows of A
// (BLOCK_M,).
template <typename Config>
__device__ __forceinline__ void promote(typename Config::Sums& sums,
                                        const typename Config::Sums& products, float scale,
                                        const float* a_scales) {
#pragma unroll
  for (int i = 0; i < Config::BLOCK_M / 2; i += 4) {
    float2 scales = {scale, scale};
    if constexpr (Config::kScaled) {
      scales = *reinterpret_cast<const float2*>(&a_scales[2 * i + lane_index() % 4 * 2]);
    }
#pragma unroll
    for (int block = 0; block < Config::kRowBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[block][i + j] += (j % 2 == 0 ? scales.x : scales.y) * products[block][i + j];
      }
    }
  }
}

// Multiplies weights or activations that have a scale for each k-block of 128 columns. The products
// of a k-block are multiplied by its scales and added to sums in float32 registers.
template <typename Config>
__device__ __forceinline__ void add_promoted(DecodedShared<Config>& shared,
                                             PipelineState<Config::kNumStages>& position,
                                             typename Config::Sums& sums, int num_k) {
  using T = typename Config::T;
  constexpr int kBlocks = Config::kRowBlocks, kNumTiles = Config::kStageTiles * kBlocks;
  static_assert(kNumTiles % 2 == 0, "the first tile of each stage goes to the first buffer");
  typename Config::Sums products;
  uint32_t operands[2][kTileSteps][4];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < Config::BLOCK_M / 2; ++i) sums[block][i] = 0.0f;
  }
  wait_full(shared, position);
  tile_of(shared, position.stage, 0).decode_into(operands[0]);
  for (int k_block = 0; k_block < num_k; ++k_block) {
    const int stage = position.stage;
    const float scale = Config::kIsFp8 ? shared.scales[stage].b[0] : 1.0f;
#pragma unroll
    for (int i = 0; i < kNumTiles; ++i) {
      const uint32_t a = shared_address(shared.stages[stage].a[i / kBlocks]);
      multiply_packed_tile<T, Config::BLOCK_M>(products[i % kBlocks], operands[i % 2],
                                               swizzled_rows_descriptor(a), i >= kBlocks);
      wgmma_wait<1>();
      pin(operands[1 - i % 2]);
      if (i < kNumTiles - 1) {
        tile_of(shared, stage, i + 1).decode_into(operands[(i + 1) % 2]);
      } else {
        position.advance();
        if (k_block + 1 < num_k) {
          wait_full(shared, position);
          tile_of(shared, position.stage, 0).decode_into(operands[0]);
        }
      }
    }
    wgmma_wait<0>();
    pin(products);
    pin(operands[1]);
    if constexpr (!Config::kScaled) release_stage<1>(shared.empty[stage]);
    promote<Config>(sums, products, scale, shared.scales[stage].a);
    if constexpr (Config::kScaled) release_stage_after_loads(shared.empty[stage]);
  }
}

}  // namespace kernelcat
