// What the wgmma kernels do: a persistent kernel in which one warpgroup fills a ring of stages,
// operands by TMA and scales by cp.async, and one to three consumer warpgroups multiply.
//
// Tensor cores add up the products of a k-block, 128 columns. Those products are then promoted,
// i.e. multiplied by their scales and added to sums in float32 registers, while the tensor cores
// run wgmmas of another warpgroup or of the next k-block. Two-level accumulation, and clusters of
// two thread blocks that share an operand, are DeepGEMM's; warpgroups that take turns at the tensor
// cores are FlashAttention-3's.
//
// barrier     | who arrives (how many)               | who waits       | for what
// full[s]     | producer of operands, with bytes (1) | consumers       | stage s holds its k-block
//             | and lanes of the scales' warp (32)   |                 | of operands and scales
// empty[s]    | consumer warps of the whole cluster  | both producers  | stage s has been read
// named 1 + c | threads of consumer c (128)          | consumer c      | is_last of its reduction
// named 4 + c | threads of both consumers (256)      | consumer c      | its turn; kTurns only
// cluster     | all threads, at start and end        | all threads     | all mbarriers, see below
//
// The cluster barrier separates the initialisation of mbarriers from their first use, and the last
// arrival from another thread block from the end of this one.
#pragma once

#include <kernelcat/operand_ring.cuh>
#include <kernelcat/split_k.cuh>
#include <kernelcat/stage_release.cuh>
#include <kernelcat/wgmma_fp8.cuh>

#include "output.cuh"
#include "scales.cuh"

namespace kernelcat {

// How promotions and wgmmas overlap.
enum class Overlap {
  kFree,   // warpgroups start wgmmas without regard to each other
  kTurns,  // one of two warpgroups multiplies while the other promotes
  kAhead,  // a warpgroup starts the wgmmas of the next k-block before it promotes
};

// What the kernel fixes at compile time. A tile is BLOCK_M x BLOCK_N of D, with kSwap of D^T: the
// 64 rows of wgmma are then rows of B, of which fewer are wasted where A has few. A consumer
// warpgroup computes kRows rows of the tile.
template <int BLOCK_M_, int BLOCK_N_, int kNumStages_, bool kSwap_, int kClusterM_, int kClusterN_,
          Overlap kOverlap_>
struct Fp8Tile {
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr int BLOCK_K = kScaleBlock;  // 128 bytes: one row of the swizzle
  static constexpr bool kSwap = kSwap_;
  static constexpr bool kSplit = true;
  static constexpr Overlap kOverlap = kOverlap_;
  static constexpr int kScaledRows = kSwap ? BLOCK_N : BLOCK_M;  // of A
  static constexpr int kNumConsumers = BLOCK_M == 64 ? 1 : BLOCK_M == 192 ? 3 : 2;
  static constexpr int kNumThreads = kWarpgroupThreads * (kNumConsumers + 1);
  static constexpr int kNumRegisters = kNumConsumers == 3 ? 160 : 232;
  static constexpr int kRows = BLOCK_M / kNumConsumers;
  static constexpr int kNumWgmmas = kRows / kWgmmaM;  // below each other
  static constexpr int kStageBytesA = BLOCK_M * kRowBytes;
  static constexpr int kStageBytes = kStageBytesA + BLOCK_N * kRowBytes;
  // Thread blocks of a cluster whose tiles lie below each other share the operand of BLOCK_N rows;
  // those whose tiles lie side by side share that of BLOCK_M rows. Each multicasts its part.
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_;
  static constexpr int kClusterSize = kClusterM * kClusterN;
  static_assert(kClusterM == 1 || kClusterN == 1);
  static_assert(BLOCK_M / kClusterN % 8 == 0 && BLOCK_N / kClusterM % 8 == 0);
  static_assert(kOverlap != Overlap::kAhead || kNumWgmmas == 1);
  static_assert(kOverlap != Overlap::kTurns || kNumConsumers == 2);

  using Sums = float[kNumWgmmas][BLOCK_N / 2];
};

template <typename Config>
struct Fp8Shared {
  alignas(1024) uint8_t stages[Config::kNumStages][Config::kStageBytes];
  StageScales<Config::kScaledRows> scales[Config::kNumStages];
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];
  uint32_t is_last[Config::kNumConsumers];
};

// The producer of scales; runs in one warp.
template <typename Config>
__device__ __forceinline__ void produce_scales(Fp8Shared<Config>& shared,
                                               const BlockSchedule<Config>& schedule,
                                               const ScaleSource& source) {
  PipelineState<Config::kNumStages> position;
  schedule.for_each([&](const WorkItem& work, int row, int col) {
    for (int k_block = work.k_begin; k_block < work.k_end; ++k_block) {
      const int stage = position.stage;
      shared.empty[stage].wait(position.phase ^ 1);
      load_scales(shared.scales[stage], source, Config::kSwap ? col : row,
                  Config::kSwap ? row : col, k_block, shared.full[stage]);
      position.advance();
    }
  });
}

// A consumer warpgroup.
template <typename Config>
struct Fp8Consumer {
  using Products = float[Config::BLOCK_N / 2];
  using Promotion = ScalePromotion<Config::BLOCK_N, Config::kSwap>;

  Fp8Shared<Config>& shared;
  PipelineState<Config::kNumStages> position;
  int index;      // of the warpgroup
  int first_row;  // the thread's first row in the tile
  uint64_t a, b;  // matrix descriptors of the warpgroup's operands in stage 0

  __device__ __forceinline__ explicit Fp8Consumer(Fp8Shared<Config>& shared) : shared(shared) {
    index = warp_index() / 4;
    first_row = index * Config::kRows + warp_index() % 4 * 16 + lane_index() / 4;
    const uint32_t base = shared_address(shared.stages);
    a = swizzled_rows_descriptor(base + index * Config::kRows * kRowBytes);
    b = swizzled_rows_descriptor(base + Config::kStageBytesA);
  }

  __device__ __forceinline__ void wait_turn() const {
    named_barrier_sync(4 + index, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    named_barrier_arrive(4 + (index ^ 1), 2 * kWarpgroupThreads);
  }

  // Starts the wgmmas of the i-th 64 rows, in the stage of `position`.
  __device__ __forceinline__ void start(Products& products, int i) const {
    using Instruction = WgmmaE4m3<Config::BLOCK_N>;
    const uint64_t stage_a =
        advanced(a, position.stage * Config::kStageBytes + i * kWgmmaM * kRowBytes);
    const uint64_t stage_b = advanced(b, position.stage * Config::kStageBytes);
    if constexpr (Config::kOverlap == Overlap::kTurns) wait_turn();
    pin(products);
    wgmma_fence();
    Instruction::template multiply<false>(products, stage_a, stage_b);
#pragma unroll
    for (int k = kWgmmaFp8K; k < Config::BLOCK_K; k += kWgmmaFp8K) {
      // Two groups: a turn is passed after the first, and the second overlaps with the other
      // warpgroup's start.
      if (Config::kOverlap == Overlap::kTurns && k == Config::BLOCK_K / 2) wgmma_commit();
      Instruction::template multiply<true>(products, advanced(stage_a, k), advanced(stage_b, k));
    }
    wgmma_commit();
    pin(products);
    if constexpr (Config::kOverlap == Overlap::kTurns) {
      wgmma_wait<1>();
      pass_turn();
    }
  }

  // Multiplies `num_k` k-blocks. `scaled_col` is the tile's first column in D, which says where the
  // scales of B change.
  __device__ __forceinline__ void accumulate(typename Config::Sums& sums, int num_k,
                                             int scaled_col) {
#pragma unroll
    for (int i = 0; i < Config::kNumWgmmas; ++i) {
#pragma unroll
      for (int j = 0; j < Config::BLOCK_N / 2; ++j) sums[i][j] = 0.0f;
    }
    if constexpr (Config::kOverlap == Overlap::kAhead) {
      accumulate_ahead(sums[0], num_k, scaled_col);
    } else {
      Products products;
      for (int k_block = 0; k_block < num_k; ++k_block) {
        shared.full[position.stage].wait(position.phase);
#pragma unroll
        for (int i = 0; i < Config::kNumWgmmas; ++i) {
          Promotion promotion;
          promotion.load(shared.scales[position.stage], first_row + i * kWgmmaM, scaled_col);
          start(products, i);
          wgmma_wait<0>();
          pin(products);
          if (i == Config::kNumWgmmas - 1)
            release_stage<Config::kClusterSize>(shared.empty[position.stage]);
          promotion.add(sums[i], products, scaled_col);
        }
        position.advance();
      }
    }
  }

  // Multiplies `num_k` k-blocks; while one is promoted, the next one is multiplied.
  __device__ __forceinline__ void accumulate_ahead(Products& sums, int num_k, int scaled_col) {
    Products products[2];
    Promotion promotions[2];
    int previous;
    const auto begin = [&](int set) {
      shared.full[position.stage].wait(position.phase);
      promotions[set].load(shared.scales[position.stage], first_row, scaled_col);
      start(products[set], 0);
      previous = position.stage;
      position.advance();
    };
    const auto end = [&](int set, int stage) {
      pin(products[set]);
      release_stage<Config::kClusterSize>(shared.empty[stage]);
      promotions[set].add(sums, products[set], scaled_col);
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

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume(Fp8Shared<Config>& shared,
                                        const BlockSchedule<Config>& schedule,
                                        const Fp8Output& output, float* partials,
                                        uint32_t* counters) {
  constexpr int kTileSums = Config::kRows * Config::BLOCK_N;  // of a consumer
  const int num_rows = Config::kSwap ? output.n : output.m;
  const int num_cols = Config::kSwap ? output.m : output.n;
  const int num_splits = schedule.list.num_splits;
  Fp8Consumer<Config> consumer(shared);
  if (Config::kOverlap == Overlap::kTurns && consumer.index == 1) consumer.pass_turn();
  schedule.for_each([&](const WorkItem& work, int tile_row, int col) {
    const int row = tile_row + consumer.index * Config::kRows;
    typename Config::Sums sums;
    consumer.accumulate(sums, work.k_end - work.k_begin, Config::kSwap ? tile_row : col);
    if (work.split_tile >= 0) {
      const int slot =
          (work.split_tile * Config::kClusterSize + schedule.rank) * Config::kNumConsumers +
          consumer.index;
      const int rows_left = max(num_rows - row - warp_index() % 4 * 16, 0);
      const int cols_left = max(num_cols - col, 0);
      const int64_t first = static_cast<int64_t>(slot) * num_splits * kTileSums;
      if (!reduce_splits(sums, partials + first, counters + slot, work.split, num_splits,
                         ceil_div(rows_left, kWgmmaM), &shared.is_last[consumer.index],
                         1 + consumer.index, ceil_div(cols_left, 8) * 4)) {
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Config::kNumWgmmas; ++i) {
      store_sums<Config::BLOCK_N, Config::kSwap>(sums[i], output, row + i * kWgmmaM, col);
    }
  });
}

// The kernels' body. `a` and `b` are the operands of what is tiled, with kSwap B and A. All tiles
// but the first `num_whole_tiles` are computed in `num_splits` splits; only for those are
// `partials`, (split tiles, num_splits, BLOCK_M * BLOCK_N), and `counters`, (split tiles,
// kNumConsumers), zeros.
template <typename Config, typename Operand>
__device__ __forceinline__ void multiply_by_wgmma(const Operand& a, const Operand& b,
                                                  const float* a_scale, const float* b_scale,
                                                  bfloat16* d, float* partials, uint32_t* counters,
                                                  int m, int n, int k, int num_whole_tiles,
                                                  int num_splits, int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<Fp8Shared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls: values that live across setmaxnreg were seen to spill.
  const auto schedule = [&] {
    return BlockSchedule<Config>::of(m, n, k, num_whole_tiles, num_splits, group_m);
  };

  if (threadIdx.x == 0) {
    prefetch(a);
    prefetch(b);
    for (Barrier& barrier : shared.full) barrier.init(1 + kWarpThreads);
    for (Barrier& barrier : shared.empty) {
      barrier.init(Config::kClusterSize * Config::kNumConsumers * 4);
    }
    fence_barrier_init();
  }
  if constexpr (Config::kClusterSize > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }
  grid_dependency_wait();

  if (warp_index() / 4 == Config::kNumConsumers) {
    decrease_registers<32>();
    const int role = warp_index() % 4;  // outside the branches: all lanes must call warp_index()
    if (role == 0) {
      if (elect_one()) produce_operands<Config>(shared, schedule(), a, b);
    } else if (role == 1) {
      produce_scales<Config>(shared, schedule(),
                             {.a_scale = a_scale,
                              .b_scale = b_scale,
                              .m = m,
                              .num_n = ceil_div(n, kScaleBlock),
                              .num_k = ceil_div(k, kScaleBlock)});
    }
  } else {
    increase_registers<Config::kNumRegisters>();
    const bool is_aligned = n % 8 == 0 && kernelcat::is_aligned(d, 16);
    consume<Config>(shared, schedule(), {.d = d, .m = m, .n = n, .is_aligned = is_aligned},
                    partials, counters);
  }
  // A thread block must not exit while others of its cluster may still arrive at its barriers.
  if constexpr (Config::kClusterSize > 1) cluster_sync();
}

}  // namespace kernelcat
