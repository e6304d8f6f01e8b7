// The producer warpgroup: weights come by TMA, rows of A by TMA or, gathered, by cp.async, and
// scales by cp.async.
#pragma once

#include <kernelcat/async_copy.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/cluster.cuh>

#include "wgmma_tile.cuh"

namespace kernelcat {

constexpr int kVectorBytes = 16;
constexpr int kRowVectors = kRowBytes / kVectorBytes;  // of a row of a stage

// What is read by cp.async.
struct CopySource {
  const uint4* a;      // (tokens, row_vectors)
  const int* order;    // (tokens * top_k,)
  ScaleSource scales;  // those of the weights are (experts, num_n, num_k)
  uint32_t top_k;
  int row_vectors;  // vectors of 16 bytes in a row of A

  // The row of A that is row `row` of all experts' rows, as an address or as vectors from `a` on.
  template <typename Row>
  __device__ __forceinline__ Row row_of_a(int row) const {
    const uint32_t token = static_cast<uint32_t>(order[row]) / top_k;
    if constexpr (sizeof(Row) == 4)
      return token * row_vectors;
    else
      return a + static_cast<int64_t>(token) * row_vectors;
  }

  // The rows of A for rows `first`, `first` + kStep ... of the tile, -1 outside the expert.
  template <bool kGather, int kStep, int kCount>
  __device__ __forceinline__ void find_rows(int (&rows)[kCount], const ExpertTile& tile,
                                            int first) const {
    const int num_left = tile.num_rows - first, row = tile.row + first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      rows[i] = -1;
      if (i * kStep >= num_left) continue;
      rows[i] = kGather ? static_cast<uint32_t>(order[row + i * kStep]) / top_k : row + i * kStep;
    }
  }
};

// A row of A as its address or, in half of the registers, as vectors from the first row on.
template <bool kByOffset>
struct GatheredRow {
  using Type = const uint4*;
};
template <>
struct GatheredRow<true> {
  using Type = uint32_t;
};

// The rows of a tile that this thread gathers, with kGather, and its vector of each row of a stage.
// The eight lanes that copy a row's 128 bytes are neighbours.
template <typename Config>
struct GatheredRows {
  static constexpr int kThreads = Config::kGather ? Config::kCopyingThreads : kWarpgroupThreads;
  static constexpr int kStep = kThreads / kRowVectors;  // rows that are copied at once
  static constexpr int kCount = Config::BLOCK_M / kStep;

  using Row = typename GatheredRow<Config::kGathersByOffset>::Type;

  Row rows[kCount];
  int count;  // of the rows, those inside the expert

  __device__ __forceinline__ GatheredRows(const CopySource& source, const ExpertTile& tile) {
    if constexpr (!Config::kGather) return;
    const int first = threadIdx.x % kThreads / kRowVectors;
    count = ceil_div(tile.num_rows - first, kStep);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (Config::kGathersByOffset) rows[i] = 0;  // a row that exists
      if (i < count) rows[i] = source.template row_of_a<Row>(tile.row + first + i * kStep);
    }
  }

  // Starts to copy k-block `k_block` to `stage`, in the 128-byte swizzle of TMA. Columns outside A
  // become zeros. Rows outside the expert keep what they hold, or become the first row of A: their
  // products are not stored.
  __device__ __forceinline__ void load(uint8_t* stage, const CopySource& source,
                                       int k_block) const {
    if constexpr (!Config::kGather) return;
    const int first = threadIdx.x % kThreads, vector = first % kRowVectors;
    const int column = k_block * kRowVectors + vector;
    const bool is_inside = column < source.row_vectors;
    const int place = is_inside ? column : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Rows i and i + 2 are at least eight rows apart, and the swizzle repeats itself there.
      const uint32_t target = swizzled<kRowBytes>((first + i % 2 * kThreads) * kVectorBytes) +
                              i / 2 * 2 * kStep * kRowBytes;
      if constexpr (Config::kGathersByOffset) {
        const uint4* from = source.a + (rows[i] + static_cast<uint32_t>(place));
        async_copy_16(shared_address(stage) + target, from, is_inside);
      } else {
        if (i < count) async_copy_16(shared_address(stage) + target, rows[i] + place, is_inside);
      }
    }
  }
};

// The scales of a tile that this thread copies, with kScaled: those of some rows, and in two
// threads those of the weights, if they have any.
template <typename Config>
struct CopiedScales {
  static constexpr int kCount = ceil_div(Config::BLOCK_M, kWarpgroupThreads);

  int rows[kCount];  // of A, or -1
  int weights_row;   // row of the matrix of all experts' scales, or -1

  __device__ __forceinline__ CopiedScales(const CopySource& source, const ExpertTile& tile) {
    if constexpr (!Config::kScaled) return;
    const int thread = threadIdx.x % kWarpgroupThreads;
    source.template find_rows<Config::kGather, kWarpgroupThreads>(rows, tile, thread);
    const int block = min(tile.col / kScaleBlock + thread, source.scales.num_n - 1);
    const bool has_weights = thread < 2 && source.scales.b_scale != nullptr;
    weights_row = has_weights ? tile.expert * source.scales.num_n + block : -1;
  }

  template <int kRows>
  __device__ __forceinline__ void load(StageScales<kRows>& target, const CopySource& source,
                                       int k_block) const {
    if constexpr (!Config::kScaled) return;
    const int thread = threadIdx.x % kWarpgroupThreads;
    const float* scales = source.scales.a_scale + static_cast<int64_t>(k_block) * source.scales.m;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = i * kWarpgroupThreads + thread;
      if (row < Config::BLOCK_M) {
        async_copy_4(&target.a[row], scales + max(rows[i], 0), rows[i] >= 0);
      }
    }
    if (weights_row >= 0) {
      const int64_t place = static_cast<int64_t>(weights_row) * source.scales.num_k + k_block;
      async_copy_4(&target.b[thread], source.scales.b_scale + place, true);
    }
  }
};

// Starts to load the weights of a stage, BLOCK_N rows of them from column `x` and row `y` on. With
// kPairs a box has half of the rows; where both thread blocks of the cluster need the same weights
// (`is_shared`), each loads one half for both.
template <typename Config>
__device__ __forceinline__ void load_weights(uint8_t* stage, const TensorMap& map, int x, int y,
                                             bool is_shared, Barrier& full) {
  if constexpr (!Config::kPairs) {
    tensor_load(stage, map, x, y, full, kDefaultPolicy);
    return;
  }
  constexpr int kRows = Config::BLOCK_N / 2;
  const uint32_t rank = cluster_rank();
  const auto receivers = static_cast<uint16_t>(is_shared ? 0b11 : 1 << rank);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (is_shared && half != rank) continue;
    tensor_load_multicast(stage + half * kRows * kRowBytes, map, x, y + half * kRows, full,
                          receivers, kDefaultPolicy);
  }
}

// Whether this thread of the producer starts TMA's loads. A lane index serves a single warp, and
// leaves it a register that a pair of tiles needs.
template <typename Config>
__device__ __forceinline__ bool is_leading_thread() {
  const bool is_one_warp = Config::kPairs && Config::kCopyingThreads == 0;
  return (is_one_warp ? lane_index() : threadIdx.x % kWarpgroupThreads) == 0;
}

// Runs in a whole warpgroup if there are kCopyingThreads, else in one warp.
template <typename Config>
__device__ __forceinline__ void produce(ExpertShared<Config>& shared,
                                        const typename Config::Tiles& tiles, const TensorMap& map_a,
                                        const TensorMap& map_w, const CopySource& source, int n,
                                        int num_k) {
  constexpr int kTmaBytes = Config::kGather ? Config::kStageBytesW : Config::kStageBytes;
  const bool is_leader = is_leading_thread<Config>();
  PipelineState<Config::kNumStages> position;
  tiles.for_each([&](const ExpertTile& tile) {
    const int row_of_w = tile.expert * n + tile.col;
    const GatheredRows<Config> rows(source, tile);
    const CopiedScales<Config> scales(source, tile);
    for (int k_block = 0; k_block < num_k; ++k_block) {
      uint8_t* stage = shared.stages[position.stage];
      Barrier& full = shared.full[position.stage];
      shared.empty[position.stage].wait(position.phase ^ 1);
      if (is_leader) {
        const int x = k_block * Config::BLOCK_K;
        full.arrive_expect(kTmaBytes);
        load_weights<Config>(stage + Config::kStageBytesA, map_w, x, row_of_w, tile.shares_weights,
                             full);
        if (!Config::kGather) tensor_load(stage, map_a, x, tile.row, full, kDefaultPolicy);
      }
      rows.load(stage, source, k_block);
      scales.load(shared.scales[Config::kScaled ? position.stage : 0], source, k_block);
      if constexpr (Config::kCopyingThreads > 0) arrive_when_copied(full);
      position.advance();
    }
  });
}

}  // namespace kernelcat
