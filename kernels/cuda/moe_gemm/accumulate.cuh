// The products of one tile, by a consumer warpgroup: 16-bit operands, or float8 with scales.
//
// Tensor cores add up the products of a k-block of float8, 128 columns. Those products are then
// promoted, i.e. multiplied by their scales and added to sums in float32 registers, as DeepGEMM and
// fp8_gemm do.
#pragma once

#include <kernelcat/stage_release.cuh>
#include <kernelcat/wgmma_fp8.cuh>

#include "wgmma_tile.cuh"

namespace kernelcat {

// Multiplies kNumWgmmas * 64 rows of one tile of 16-bit operands. A stage is released when the
// products of the next one have begun. With kTurns the other consumer's turn begins when all wgmmas
// have been started.
template <typename Config, int kNumWgmmas>
__device__ __forceinline__ void accumulate_plain(ExpertShared<Config>& shared,
                                                 PipelineState<Config::kNumStages>& position,
                                                 float (&sums)[kNumWgmmas][Config::BLOCK_N / 2],
                                                 int first_row, int num_k) {
  const uint32_t base = shared_address(shared.stages);
  const uint64_t a = swizzled_rows_descriptor(base + first_row * kRowBytes);
  const uint64_t w = swizzled_rows_descriptor(base + Config::kStageBytesA);
  int previous = 0;
  for (int k_block = 0; k_block < num_k; ++k_block) {
    const int stage = position.stage;
    shared.full[stage].wait(position.phase);
    if constexpr (Config::kGather) fence_async_shared();  // cp.async wrote what wgmma reads
    multiply_stage<typename Config::T, Config::BLOCK_N>(
        sums, advanced(a, stage * Config::kStageBytes), advanced(w, stage * Config::kStageBytes),
        k_block > 0);
    if (k_block > 0) {
      wgmma_wait<1>();
      release_stage<Config::kClusterSize>(shared.empty[previous]);
    }
    previous = stage;
    position.advance();
  }
  if constexpr (Config::kTurns) {
    const int consumer = warp_index() / 4;
    if (lane_index() == 0) shared.turns()[1 - consumer].arrive();
  }
  wgmma_wait<0>();
  pin(sums);
  release_stage<Config::kClusterSize>(shared.empty[previous]);
}

// Multiplies float8 operands and promotes the products.
template <typename Config>
struct ScaledProducts {
  using Products = typename Config::Products;
  using Promotion = ScalePromotion<Config::BLOCK_N, false>;

  ExpertShared<Config>& shared;
  PipelineState<Config::kNumStages>& position;
  uint64_t a, w;  // matrix descriptors of the consumer's operands in stage 0
  int row;        // the thread's first row in the tile
  int col;        // the tile's first column

  __device__ __forceinline__ ScaledProducts(ExpertShared<Config>& shared,
                                            PipelineState<Config::kNumStages>& position,
                                            int first_row, int col)
      : shared(shared), position(position), col(col) {
    const uint32_t base = shared_address(shared.stages);
    a = swizzled_rows_descriptor(base + first_row * kRowBytes);
    w = swizzled_rows_descriptor(base + Config::kStageBytesA);
    row = first_row + warp_index() % 4 * 16 + lane_index() / 4;
  }

  // Loads the scales of the i-th 64 rows of the stage of `position`, and starts their products.
  __device__ __forceinline__ void start(Products& products, Promotion& promotion, int i) const {
    using Instruction = WgmmaE4m3<Config::BLOCK_N>;
    const int stage = position.stage;
    promotion.load(shared.scales[stage], row + i * kWgmmaM, col);
    const uint64_t left = advanced(a, stage * Config::kStageBytes + i * kWgmmaM * kRowBytes);
    const uint64_t right = advanced(w, stage * Config::kStageBytes);
    pin(products);
    wgmma_fence();
    Instruction::template multiply<false>(products, left, right);
#pragma unroll
    for (int k = kWgmmaFp8K; k < Config::BLOCK_K; k += kWgmmaFp8K) {
      Instruction::template multiply<true>(products, advanced(left, k), advanced(right, k));
    }
    wgmma_commit();
    pin(products);
  }

  // Waits until the stage of `position` is full.
  __device__ __forceinline__ void wait() const {
    shared.full[position.stage].wait(position.phase);
    if constexpr (Config::kGather) fence_async_shared();  // cp.async wrote what wgmma reads
  }

  // Multiplies `num_k` k-blocks, one after the other.
  __device__ __forceinline__ void add_to(typename Config::Sums& sums, int num_k) {
    Products products;
    for (int k_block = 0; k_block < num_k; ++k_block) {
      wait();
#pragma unroll
      for (int i = 0; i < Config::kNumWgmmas; ++i) {
        Promotion promotion;
        start(products, promotion, i);
        wgmma_wait<0>();
        pin(products);
        if (i == Config::kNumWgmmas - 1)
          release_stage<Config::kClusterSize>(shared.empty[position.stage]);
        promotion.add(sums[i], products, col);
      }
      position.advance();
    }
  }

  // Multiplies `num_k` k-blocks; while one is promoted, the next one is multiplied.
  __device__ __forceinline__ void add_ahead_to(Products& sums, int num_k) {
    Products products[2];
    Promotion promotions[2];
    int previous;  // stage of the products that are started last
    const auto begin = [&](int set) {
      wait();
      start(products[set], promotions[set], 0);
      previous = position.stage;
      position.advance();
    };
    const auto end = [&](int set, int stage) {
      pin(products[set]);
      release_stage<Config::kClusterSize>(shared.empty[stage]);
      promotions[set].add(sums, products[set], col);
    };
    const auto step = [&](int set) {
      const int stage = previous;
      begin(set ^ 1);
      wgmma_wait<1>();
      end(set, stage);
    };
    begin(0);
    for (int i = 0; i < (num_k - 1) / 2; ++i) {
      step(0);
      step(1);
    }
    if (num_k % 2 == 0) {
      step(0);
      wgmma_wait<0>();
      end(1, previous);
    } else {
      wgmma_wait<0>();
      end(0, previous);
    }
  }
};

// Multiplies one tile, from row `first_row` on.
template <typename Config>
__device__ __forceinline__ void accumulate(ExpertShared<Config>& shared,
                                           PipelineState<Config::kNumStages>& position,
                                           typename Config::Sums& sums, const ExpertTile& tile,
                                           int first_row, int num_k) {
  if constexpr (Config::kTurns) {
    if (tile.num_rows <= kWgmmaM) {
      float upper[1][Config::BLOCK_N / 2];
      accumulate_plain<Config>(shared, position, upper, 0, num_k);
#pragma unroll
      for (int i = 0; i < Config::BLOCK_N / 2; ++i) sums[0][i] = upper[0][i];
      return;
    }
  }
  if constexpr (!Config::kScaled) {
    accumulate_plain<Config>(shared, position, sums, first_row, num_k);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kNumWgmmas; ++i) {
#pragma unroll
      for (int j = 0; j < Config::BLOCK_N / 2; ++j) sums[i][j] = 0.0f;
    }
    ScaledProducts<Config> scaled(shared, position, first_row, tile.col);
    if constexpr (Config::kAhead) {
      scaled.add_ahead_to(sums[0], num_k);
    } else {
      scaled.add_to(sums, num_k);
    }
  }
}

}  // namespace kernelcat
