// D = A @ B^T (+ bias) on Hopper: a persistent kernel in which one warpgroup feeds a ring of stages
// by TMA and one or two others multiply from it by wgmma, optionally with the k range split.
//
// The division of labour, the register reallocation and the grouped order of tiles are those of
// CUTLASS's and DeepGEMM's warp-specialized kernels.
#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/gemm_output.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/split_k.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/tile_order.cuh>
#include <kernelcat/wgmma.cuh>

namespace kernelcat {

constexpr int BLOCK_K = 64;  // 128 bytes: one row of the swizzle

// What is known at compile time. A consumer warpgroup owns kRows rows of the tile.
template <typename T_, int BLOCK_M_, int BLOCK_N_, int kNumStages_, bool kTmaStore_>
struct WgmmaTile {
  using T = T_;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr bool kTmaStore = kTmaStore_;
  static constexpr int kNumConsumers = BLOCK_M == 64 ? 1 : 2;
  static constexpr int kNumThreads = kWarpgroupThreads * (kNumConsumers + 1);
  static constexpr int kRows = BLOCK_M / kNumConsumers;
  static constexpr int kNumWgmmas = kRows / kWgmmaM;  // one below the other
  static constexpr int kStageBytesA = BLOCK_M * BLOCK_K * 2;
  static constexpr int kStageBytes = kStageBytesA + BLOCK_N * BLOCK_K * 2;
  // Output leaves in chunks of 64 rows, two buffers a consumer.
  static constexpr int kChunkCols = BLOCK_N % 64 == 0 ? 64 : BLOCK_N % 32 == 0 ? 32 : 16;
  static constexpr int kChunkBytes = kWgmmaM * kChunkCols * 2;
  static_assert(BLOCK_M % 64 == 0 && BLOCK_N % 16 == 0);

  using Accumulators = float[kNumWgmmas][BLOCK_N / 2];
};

template <typename Config>
struct WgmmaShared {
  alignas(1024) uint8_t stages[Config::kNumStages][Config::kStageBytes];  // A, then B
  alignas(1024) uint8_t chunks[Config::kNumConsumers][2][Config::kChunkBytes];
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];
  uint32_t is_last[Config::kNumConsumers];
};

// A share of a tile's k range: blocks [k_begin, k_end) of BLOCK_K.
struct Work {
  int tile, split, row, col, k_begin, k_end;
};

// Every unit of work in its order; splits of a tile are neighbours, so that they run together.
template <typename Config>
struct WorkList {
  int num_m, num_n, num_k, num_splits, group_m;

  __device__ __forceinline__ int size() const { return num_m * num_n * num_splits; }

  __device__ __forceinline__ Work operator[](int index) const {
    const int tile = index / num_splits, split = index % num_splits;
    const Tile at = grouped_tile(tile, num_m, num_n, group_m);
    const auto k_at = [&](int s) { return num_k * s / num_splits; };
    return {tile,        split,          at.m * Config::BLOCK_M, at.n * Config::BLOCK_N,
            k_at(split), k_at(split + 1)};
  }
};

// Runs in one thread.
template <typename Config>
__device__ __forceinline__ void produce(WgmmaShared<Config>& shared, const WorkList<Config>& list,
                                        const TensorMap& map_a, const TensorMap& map_b) {
  const uint64_t policy = evict_normal_policy();
  RingPosition<Config::kNumStages> position;
  for (int index = blockIdx.x; index < list.size(); index += gridDim.x) {
    const Work work = list[index];
    for (int k_block = work.k_begin; k_block < work.k_end; ++k_block) {
      const int stage = position.stage;
      shared.empty[stage].wait(position.parity ^ 1);
      Barrier& full = shared.full[stage];
      full.arrive_expect(Config::kStageBytes);
      tensor_load(shared.stages[stage], map_a, k_block * BLOCK_K, work.row, full, policy);
      tensor_load(shared.stages[stage] + Config::kStageBytesA, map_b, k_block * BLOCK_K, work.col,
                  full, policy);
      position.advance();
    }
  }
}

// One stage: kRows x BLOCK_N x BLOCK_K. Starts the wgmmas and commits them as one group.
template <typename Config>
__device__ __forceinline__ void multiply_stage(typename Config::Accumulators& sums, uint64_t a,
                                               uint64_t b, bool accumulate) {
#pragma unroll
  for (int i = 0; i < Config::kNumWgmmas; ++i) pin(sums[i]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < BLOCK_K / kWgmmaK; ++k) {
#pragma unroll
    for (int i = 0; i < Config::kNumWgmmas; ++i) {
      Wgmma<typename Config::T, Config::BLOCK_N>::multiply(
          sums[i], advanced(a, i * kWgmmaM * BLOCK_K * 2 + k * kWgmmaK * 2),
          advanced(b, k * kWgmmaK * 2), accumulate || k > 0);
    }
  }
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < Config::kNumWgmmas; ++i) pin(sums[i]);
}

// One unit of work. A stage is given back when the next one's wgmmas have been started.
template <typename Config>
__device__ __forceinline__ void accumulate(WgmmaShared<Config>& shared,
                                           RingPosition<Config::kNumStages>& position,
                                           typename Config::Accumulators& sums, int consumer,
                                           int num_k) {
  const uint32_t base = shared_address(shared.stages);
  const uint64_t a = swizzled_rows_descriptor(base + consumer * Config::kRows * BLOCK_K * 2);
  const uint64_t b = swizzled_rows_descriptor(base + Config::kStageBytesA);
  int previous = 0;
  for (int k_block = 0; k_block < num_k; ++k_block) {
    const int stage = position.stage;
    shared.full[stage].wait(position.parity);
    multiply_stage<Config>(sums, advanced(a, stage * Config::kStageBytes),
                           advanced(b, stage * Config::kStageBytes), k_block > 0);
    if (k_block > 0) {
      wgmma_wait<1>();
      if (lane_index() == 0) shared.empty[previous].arrive();
    }
    previous = stage;
    position.advance();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Config::kNumWgmmas; ++i) pin(sums[i]);
  if (lane_index() == 0) shared.empty[previous].arrive();
}

// A chunk of 64 rows x kChunkCols columns of one wgmma's sums, rounded, goes to a swizzled buffer.
// `first` is the chunk's first column in the tile, `col` in D.
template <typename Config>
__device__ __forceinline__ void write_chunk(uint8_t* chunk,
                                            const float (&sums)[Config::BLOCK_N / 2], int first,
                                            const GemmOutput<typename Config::T>& output, int col) {
  constexpr int kSpan = Config::kChunkCols * 2;
  const int lane = lane_index();
  const int row = warp_index() % 4 * 16 + lane % 16;  // which this lane addresses
#pragma unroll
  for (int j = 0; j < Config::kChunkCols; j += 16) {
    uint32_t matrices[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* pair = &sums[(first + j + 8 * h) / 2];
      const float2 bias = output.bias_at(col + j + 8 * h + lane % 4 * 2);
      matrices[2 * h] = pack<typename Config::T>(pair[0] + bias.x, pair[1] + bias.y);
      matrices[2 * h + 1] = pack<typename Config::T>(pair[2] + bias.x, pair[3] + bias.y);
    }
    const uint32_t offset = row * kSpan + (j + lane / 16 * 8) * 2;
    store_matrices(shared_address(chunk) + swizzled<kSpan>(offset), matrices);
  }
}

// A warp's 16 rows of a chunk go to D by ordinary stores, for rows no tensor map can describe.
template <typename Config>
__device__ __forceinline__ void drain_chunk(const uint8_t* chunk,
                                            const GemmOutput<typename Config::T>& output, int row,
                                            int col) {
  constexpr int kSpan = Config::kChunkCols * 2, kPairs = Config::kChunkCols / 2;
  const int warp_row = warp_index() % 4 * 16;
  for (int i = lane_index(); i < 16 * kPairs; i += kWarpThreads) {
    const int my_row = warp_row + i / kPairs, pair = i % kPairs;
    const uint8_t* address = chunk + swizzled<kSpan>(my_row * kSpan + pair * 4);
    output.store_pair(row + my_row, col + 2 * pair, *reinterpret_cast<const uint32_t*>(address));
  }
}

// The sums leave through shared memory, chunk after chunk in two buffers. With tensor maps one
// thread starts the stores, and the last ones drain while the next tile is computed.
template <typename Config>
__device__ __forceinline__ void store_tile(uint8_t (&chunks)[2][Config::kChunkBytes],
                                           const typename Config::Accumulators& sums,
                                           const TensorMap& map_d,
                                           const GemmOutput<typename Config::T>& output, int row,
                                           int col, int barrier) {
  const bool leader = threadIdx.x % kWarpgroupThreads == 0;
  constexpr int kChunksPerRow = Config::BLOCK_N / Config::kChunkCols;
  constexpr int kNumChunks = Config::kNumWgmmas * kChunksPerRow;
  // An odd number of chunks ends a tile in the buffer in which the next one begins.
  if (Config::kTmaStore && leader && kNumChunks % 2 == 1) wait_stores_read<0>();
#pragma unroll
  for (int i = 0; i < kNumChunks; ++i) {
    const int first = i % kChunksPerRow * Config::kChunkCols;
    const int my_row = row + i / kChunksPerRow * kWgmmaM, my_col = col + first;
    uint8_t* chunk = chunks[i % 2];
    if constexpr (Config::kTmaStore) {
      if (leader) wait_stores_read<1>();
      named_barrier_sync(barrier, kWarpgroupThreads);
      write_chunk<Config>(chunk, sums[i / kChunksPerRow], first, output, my_col);
      fence_async_shared();
      named_barrier_sync(barrier, kWarpgroupThreads);
      if (leader) {
        if (my_row < output.m && my_col < output.n) {
          tensor_store(map_d, chunk, my_col, my_row, evict_normal_policy());
        }
        commit_stores();
      }
    } else {
      write_chunk<Config>(chunk, sums[i / kChunksPerRow], first, output, my_col);
      __syncwarp();
      drain_chunk<Config>(chunk, output, my_row, my_col);
      __syncwarp();
    }
  }
}

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume(WgmmaShared<Config>& shared, const WorkList<Config>& list,
                                        const TensorMap& map_d,
                                        const GemmOutput<typename Config::T>& output,
                                        float* partials, uint32_t* counters) {
  constexpr int kPartials = Config::kRows * Config::BLOCK_N;
  const int consumer = warp_index() / 4;
  const int barrier = 1 + consumer;
  RingPosition<Config::kNumStages> position;
  for (int index = blockIdx.x; index < list.size(); index += gridDim.x) {
    const Work work = list[index];
    const int row = work.row + consumer * Config::kRows;
    typename Config::Accumulators sums;
    accumulate<Config>(shared, position, sums, consumer, work.k_end - work.k_begin);
    if (list.num_splits > 1) {
      const int slot = work.tile * Config::kNumConsumers + consumer;
      const int rows_left = output.m - row - warp_index() % 4 * 16;
      const int num_live = rows_left > 0 ? ceil_div(rows_left, kWgmmaM) : 0;
      const int64_t first = static_cast<int64_t>(slot) * list.num_splits * kPartials;
      if (!reduce_splits(sums, partials + first, counters + slot, work.split, list.num_splits,
                         num_live, &shared.is_last[consumer], barrier)) {
        continue;
      }
    }
    store_tile<Config>(shared.chunks[consumer], sums, map_d, output, row, work.col, barrier);
  }
  if (Config::kTmaStore) wait_stores_read<0>();
}

// With num_splits > 1, `partials` holds BLOCK_M * BLOCK_N floats a unit of work and `counters` one
// zero a tile and consumer. `map_d` is not read unless kTmaStore.
template <typename T, int BLOCK_M, int BLOCK_N, int kNumStages, bool kTmaStore>
__global__ void __launch_bounds__(
    WgmmaTile<T, BLOCK_M, BLOCK_N, kNumStages, kTmaStore>::kNumThreads, 1)
    gemm_wgmma(const __grid_constant__ TensorMap map_a,  // (m, k), boxes of BLOCK_M x BLOCK_K
               const __grid_constant__ TensorMap map_b,  // (n, k), boxes of BLOCK_N x BLOCK_K
               const __grid_constant__ TensorMap map_d,  // (m, n), boxes of 64 x kChunkCols
               const T* bias,                            // (n,) or null
               T* d,                                     // (m, n)
               float* partials, uint32_t* counters, int m, int n, int k, int num_splits,
               int group_m) {
  using Config = WgmmaTile<T, BLOCK_M, BLOCK_N, kNumStages, kTmaStore>;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<WgmmaShared<Config>*>(dynamic_shared + padding);
  // Called in each role: values that live across setmaxnreg were seen to spill.
  const auto list = [&]() -> WorkList<Config> {
    return {ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), ceil_div(k, BLOCK_K), num_splits, group_m};
  };

  if (threadIdx.x == 0) {
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) barrier.init(Config::kNumConsumers * 4);
    fence_barrier_init();
  }
  __syncthreads();

  if (warp_index() / 4 == Config::kNumConsumers) {
    decrease_registers<40>();
    if (warp_index() % 4 == 0 && elect_one()) {
      prefetch_map(map_a);
      prefetch_map(map_b);
      produce<Config>(shared, list(), map_a, map_b);
    }
  } else {
    increase_registers<232>();
    consume<Config>(shared, list(), map_d, {d, bias, m, n}, partials, counters);
  }
}

}  // namespace kernelcat
