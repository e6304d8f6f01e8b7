// D = A @ B^T on Hopper by clusters of blocks whose tiles lie side by side: tiles of a cluster row
// share their rows of A, tiles of a cluster column their rows of B. How a shared operand reaches
// every block that needs it is a template argument; all else is one and the same persistent,
// warp-specialized kernel, so that a measured difference is the transfer's.
//
// Loading a shared operand in slices, one a block, each multicast to its sharers, and counting the
// consumers of all sharers before a stage is filled again: both are CUTLASS's.
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/cluster.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/tile_order.cuh>
#include <kernelcat/wgmma_stage.cuh>

namespace kernelcat {

enum class Transfer {
  kUnicast,    // every block loads all that it needs
  kMulticast,  // a block loads its slice, and the copy engine writes it to all sharers
  kDsmem,      // a block loads its slice, and copies it on from its own shared memory
};

// What is known at compile time. A consumer warpgroup owns kRows rows of the tile.
template <typename T_, int BLOCK_M_, int BLOCK_N_, int CLUSTER_M_, int CLUSTER_N_, int kNumStages_,
          Transfer kTransfer_>
struct ClusterTile {
  using T = T_;
  static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, kNumStages = kNumStages_;
  static constexpr int CLUSTER_M = CLUSTER_M_, CLUSTER_N = CLUSTER_N_;
  static constexpr Transfer kTransfer = kTransfer_;
  static constexpr bool kShares = kTransfer != Transfer::kUnicast;
  static constexpr int kClusterSize = CLUSTER_M * CLUSTER_N;

  static constexpr int kNumConsumers = 2;
  static constexpr int kNumThreads = kWarpgroupThreads * (kNumConsumers + 1);
  static constexpr int kRows = BLOCK_M / kNumConsumers;
  static constexpr int kNumWgmmas = kRows / kWgmmaM;  // one below the other

  // Blocks that share an operand, and the slice of it that each of them loads.
  static constexpr int kSharersA = kShares ? CLUSTER_N : 1, kSharersB = kShares ? CLUSTER_M : 1;
  static constexpr int kNumPeers = kSharersA + kSharersB - 1;  // this block among them
  static constexpr int kBytesA = BLOCK_M * kRowBytes, kBytesB = BLOCK_N * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kSliceRowsA = BLOCK_M / kSharersA, kSliceRowsB = BLOCK_N / kSharersB;
  static constexpr int kSliceBytesA = kBytesA / kSharersA, kSliceBytesB = kBytesB / kSharersB;

  // Output leaves in chunks of 64 x 64, two buffers a consumer.
  static constexpr int kChunkCols = 64, kChunkBytes = kWgmmaM * kChunkCols * 2;
  static constexpr int kChunksPerRow = BLOCK_N / kChunkCols;

  static_assert(kRows % kWgmmaM == 0 && BLOCK_N % kChunkCols == 0);
  static_assert(kSliceBytesA % 1024 == 0 && kSliceBytesB % 1024 == 0, "whole swizzle atoms");

  using Accumulators = float[kNumWgmmas][BLOCK_N / 2];
};

template <typename Config>
struct ClusterShared {
  alignas(1024) uint8_t stages[Config::kNumStages][Config::kStageBytes];  // A, then B
  alignas(1024) uint8_t chunks[Config::kNumConsumers][2][Config::kChunkBytes];
  Barrier full[Config::kNumStages];    // all of a stage is here
  Barrier empty[Config::kNumStages];   // all blocks that this one feeds have used the stage
  Barrier landed[Config::kNumStages];  // kDsmem: this block's own slices are here
};

// Where this block is in its cluster, and which slices are its own.
template <typename Config>
struct Place {
  int m, n;

  static __device__ __forceinline__ Place here() {
    const int rank = static_cast<int>(cluster_rank());
    return {rank % Config::CLUSTER_M, rank / Config::CLUSTER_M};
  }
  static __device__ __forceinline__ uint32_t rank_of(int m, int n) {
    return n * Config::CLUSTER_M + m;
  }

  __device__ __forceinline__ int slice_a() const { return Config::kShares ? n : 0; }
  __device__ __forceinline__ int slice_b() const { return Config::kShares ? m : 0; }

  // The blocks of this cluster row and of this cluster column, a bit each.
  __device__ __forceinline__ uint16_t row_mask() const {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < Config::CLUSTER_N; ++i) mask |= 1u << rank_of(m, i);
    return static_cast<uint16_t>(mask);
  }
  __device__ __forceinline__ uint16_t column_mask() const {
    return static_cast<uint16_t>(((1u << Config::CLUSTER_M) - 1) << rank_of(0, n));
  }

  // Peer `i` of kNumPeers: those of this column, this block among them, then the rest of the row.
  __device__ __forceinline__ uint32_t peer(int i) const {
    if (i < Config::CLUSTER_M) return rank_of(i, n);
    const int other = i - Config::CLUSTER_M;
    return rank_of(m, other + (other >= n));
  }
};

// The tiles of this block in their order. The blocks of a cluster take neighbouring tiles at the
// same time, also where some of these lie outside of D: their peers need what they load.
template <typename Config>
struct Schedule {
  int num_m, num_n, num_k, group_m;  // clusters' tiles; blocks of BLOCK_K

  __device__ __forceinline__ Schedule(int m, int n, int k, int group_m)
      : num_m(ceil_div(m, Config::BLOCK_M * Config::CLUSTER_M)),
        num_n(ceil_div(n, Config::BLOCK_N * Config::CLUSTER_N)),
        num_k(ceil_div(k, BLOCK_K)),
        group_m(group_m) {}

  static __device__ __forceinline__ int first() { return blockIdx.x / Config::kClusterSize; }
  static __device__ __forceinline__ int step() { return gridDim.x / Config::kClusterSize; }
  __device__ __forceinline__ int size() const { return num_m * num_n; }

  __device__ __forceinline__ Tile tile(int index, Place<Config> place) const {
    const Tile at = grouped_tile(index, num_m, num_n, group_m);
    return {at.m * Config::CLUSTER_M + place.m, at.n * Config::CLUSTER_N + place.n};
  }
};

// Starts the loads of this block's slices of a stage. Row `row` of A and `col` of B are the first
// ones of the block's tile.
template <typename Config>
__device__ __forceinline__ void load_slices(uint8_t* stage, const TensorMap& map_a,
                                            const TensorMap& map_b, int k, int row, int col,
                                            Place<Config> place, Barrier& barrier) {
  constexpr bool kMulticast = Config::kTransfer == Transfer::kMulticast;
  uint8_t* a = stage + place.slice_a() * Config::kSliceBytesA;
  uint8_t* b = stage + Config::kBytesA + place.slice_b() * Config::kSliceBytesB;
  row += place.slice_a() * Config::kSliceRowsA;
  col += place.slice_b() * Config::kSliceRowsB;
  if constexpr (kMulticast && Config::kSharersA > 1) {
    tensor_load_multicast(a, map_a, k, row, barrier, place.row_mask(), kDefaultPolicy);
  } else {
    tensor_load(a, map_a, k, row, barrier, kDefaultPolicy);
  }
  if constexpr (kMulticast && Config::kSharersB > 1) {
    tensor_load_multicast(b, map_b, k, col, barrier, place.column_mask(), kDefaultPolicy);
  } else {
    tensor_load(b, map_b, k, col, barrier, kDefaultPolicy);
  }
}

// Runs in one thread. A stage is filled, here and in the peers, once every block that is written
// to has used it; a full barrier therefore sees bytes of its own round only, though perhaps before
// it is told how many to expect.
template <typename Config>
__device__ __forceinline__ void produce(ClusterShared<Config>& shared,
                                        const Schedule<Config>& schedule, const TensorMap& map_a,
                                        const TensorMap& map_b) {
  constexpr bool kDsmem = Config::kTransfer == Transfer::kDsmem;
  constexpr int kBytes = kDsmem ? Config::kSliceBytesA + Config::kSliceBytesB : Config::kStageBytes;
  const auto place = Place<Config>::here();
  PipelineState<Config::kNumStages> position;
  for (int index = schedule.first(); index < schedule.size(); index += schedule.step()) {
    const Tile tile = schedule.tile(index, place);
    for (int k_block = 0; k_block < schedule.num_k; ++k_block) {
      const int stage = position.stage;
      shared.empty[stage].wait(position.phase ^ 1);
      Barrier& barrier = kDsmem ? shared.landed[stage] : shared.full[stage];
      barrier.arrive_expect(kBytes);
      load_slices<Config>(shared.stages[stage], map_a, map_b, k_block * BLOCK_K,
                          tile.m * Config::BLOCK_M, tile.n * Config::BLOCK_N, place, barrier);
      position.advance();
    }
  }
  // A block outlives its last signals: those of the peers that were sent its slices.
  for (int i = 0; i < Config::kNumStages; ++i) {
    shared.empty[position.stage].wait(position.phase ^ 1);
    position.advance();
  }
}

// Runs in one thread, kDsmem only: copies each stage's own slices to the peers when they are here.
template <typename Config>
__device__ __forceinline__ void pass_on(ClusterShared<Config>& shared,
                                        const Schedule<Config>& schedule) {
  constexpr int kForeignBytes = Config::kStageBytes - Config::kSliceBytesA - Config::kSliceBytesB;
  const auto place = Place<Config>::here();
  PipelineState<Config::kNumStages> position;
  for (int index = schedule.first(); index < schedule.size(); index += schedule.step()) {
    for (int k_block = 0; k_block < schedule.num_k; ++k_block) {
      Barrier& full = shared.full[position.stage];
      const uint8_t* stage = shared.stages[position.stage];
      const uint8_t* a = stage + place.slice_a() * Config::kSliceBytesA;
      const uint8_t* b = stage + Config::kBytesA + place.slice_b() * Config::kSliceBytesB;
      shared.landed[position.stage].wait(position.phase);
      full.arrive_expect(kForeignBytes);
#pragma unroll
      for (int i = 0; i < Config::CLUSTER_N; ++i) {
        if (i != place.n)
          bulk_copy_to_peer(a, Config::kSliceBytesA, full, place.rank_of(place.m, i));
      }
#pragma unroll
      for (int i = 0; i < Config::CLUSTER_M; ++i) {
        if (i != place.m)
          bulk_copy_to_peer(b, Config::kSliceBytesB, full, place.rank_of(i, place.n));
      }
      position.advance();
    }
  }
}

// A warp gives a stage back to every block that writes into it.
template <typename Config>
__device__ __forceinline__ void release(Barrier& empty, Place<Config> place) {
  if constexpr (Config::kNumPeers == 1) {
    if (lane_index() == 0) empty.arrive();
  } else {
    if (lane_index() < Config::kNumPeers) arrive_remote(empty, place.peer(lane_index()));
  }
}

// One tile. A stage is given back when the next one's wgmmas have been started.
template <typename Config>
__device__ __forceinline__ void accumulate(ClusterShared<Config>& shared,
                                           PipelineState<Config::kNumStages>& position,
                                           typename Config::Accumulators& sums, int consumer,
                                           int num_k, Place<Config> place) {
  const uint32_t base = shared_address(shared.stages);
  const uint64_t a = swizzled_rows_descriptor(base + consumer * Config::kRows * kRowBytes);
  const uint64_t b = swizzled_rows_descriptor(base + Config::kBytesA);
  int previous = 0;
  for (int k_block = 0; k_block < num_k; ++k_block) {
    const int stage = position.stage;
    shared.full[stage].wait(position.phase);
    multiply_stage<typename Config::T, Config::BLOCK_N>(
        sums, advanced(a, stage * Config::kStageBytes), advanced(b, stage * Config::kStageBytes),
        k_block > 0);
    if (k_block > 0) {
      wgmma_wait<1>();
      release<Config>(shared.empty[previous], place);
    }
    previous = stage;
    position.advance();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Config::kNumWgmmas; ++i) pin(sums[i]);
  release<Config>(shared.empty[previous], place);
}

// 64 x kChunkCols sums, from column `first` of the tile on, go to a swizzled buffer.
template <typename Config>
__device__ __forceinline__ void write_chunk(uint8_t* chunk,
                                            const float (&sums)[Config::BLOCK_N / 2], int first) {
  constexpr int kSpan = Config::kChunkCols * 2;
  const int lane = lane_index();
  const int row = warp_index() % 4 * 16 + lane % 16;  // which this lane addresses
#pragma unroll
  for (int j = 0; j < Config::kChunkCols; j += 16) {
    uint32_t matrices[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &sums[(first + j) / 2 + 2 * i];
      matrices[i] = pack<typename Config::T>(pair[0], pair[1]);
    }
    const uint32_t offset = row * kSpan + (j + lane / 16 * 8) * 2;
    store_matrices(shared_address(chunk) + swizzled<kSpan>(offset), matrices);
  }
}

// The sums leave through shared memory, chunk after chunk in two buffers. One thread starts the
// stores, and the last ones drain while the next tile is computed.
template <typename Config>
__device__ __forceinline__ void store_tile(uint8_t (&chunks)[2][Config::kChunkBytes],
                                           const typename Config::Accumulators& sums,
                                           const TensorMap& map_d, int m, int n, int row, int col,
                                           int barrier) {
  const bool leader = threadIdx.x % kWarpgroupThreads == 0;
  constexpr int kNumChunks = Config::kNumWgmmas * Config::kChunksPerRow;
  // An odd number of chunks ends a tile in the buffer in which the next one begins.
  if (leader && kNumChunks % 2 == 1) wait_stores_read<0>();
#pragma unroll
  for (int i = 0; i < kNumChunks; ++i) {
    const int first = i % Config::kChunksPerRow * Config::kChunkCols;
    const int my_row = row + i / Config::kChunksPerRow * kWgmmaM, my_col = col + first;
    uint8_t* chunk = chunks[i % 2];
    if (leader) wait_stores_read<1>();
    named_barrier_sync(barrier, kWarpgroupThreads);
    write_chunk<Config>(chunk, sums[i / Config::kChunksPerRow], first);
    fence_async_shared();
    named_barrier_sync(barrier, kWarpgroupThreads);
    if (leader) {
      if (my_row < m && my_col < n) {
        tensor_store(map_d, chunk, my_col, my_row, kDefaultPolicy);
      }
      commit_stores();
    }
  }
}

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume(ClusterShared<Config>& shared,
                                        const Schedule<Config>& schedule, const TensorMap& map_d,
                                        int m, int n) {
  const int consumer = warp_index() / 4;
  const auto place = Place<Config>::here();
  PipelineState<Config::kNumStages> position;
  for (int index = schedule.first(); index < schedule.size(); index += schedule.step()) {
    const Tile tile = schedule.tile(index, place);
    typename Config::Accumulators sums;
    accumulate<Config>(shared, position, sums, consumer, schedule.num_k, place);
    store_tile<Config>(shared.chunks[consumer], sums, map_d, m, n,
                       tile.m * Config::BLOCK_M + consumer * Config::kRows,
                       tile.n * Config::BLOCK_N, 1 + consumer);
  }
  wait_stores_read<0>();
}

// Launched in clusters of CLUSTER_M * CLUSTER_N blocks along x.
template <typename T, int BLOCK_M, int BLOCK_N, int CLUSTER_M, int CLUSTER_N, int kNumStages,
          Transfer kTransfer>
__global__ void __launch_bounds__(3 * kWarpgroupThreads, 1)
    multicast_gemm(const __grid_constant__ TensorMap map_a,  // (m, k), boxes of a slice x BLOCK_K
                   const __grid_constant__ TensorMap map_b,  // (n, k), boxes of a slice x BLOCK_K
                   const __grid_constant__ TensorMap map_d,  // (m, n), boxes of 64 x 64
                   int m, int n, int k, int group_m) {
  using Config = ClusterTile<T, BLOCK_M, BLOCK_N, CLUSTER_M, CLUSTER_N, kNumStages, kTransfer>;
  extern __shared__ uint8_t dynamic_shared[];
  // The same in every block, so that peers find things where this block has them.
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<ClusterShared<Config>*>(dynamic_shared + padding);
  // Called in each role: values that live across setmaxnreg were seen to spill.
  const auto schedule = [&] { return Schedule<Config>(m, n, k, group_m); };

  if (threadIdx.x == 0) {
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.landed) barrier.init(1);
    for (Barrier& barrier : shared.empty) {
      barrier.init(Config::kNumPeers * Config::kNumConsumers * 4);
    }
    fence_barrier_init();
  }
  cluster_arrive_relaxed();
  cluster_wait();

  if (warp_index() / 4 == Config::kNumConsumers) {
    decrease_registers<40>();
    const int role = warp_index() % 4;  // by a shuffle, which a part of a warp must not call
    if (role == 0 && elect_one()) {
      prefetch_map(map_a);
      prefetch_map(map_b);
      produce<Config>(shared, schedule(), map_a, map_b);
    }
    if (kTransfer == Transfer::kDsmem && role == 1 && elect_one()) {
      pass_on<Config>(shared, schedule());
    }
  } else {
    increase_registers<232>();
    consume<Config>(shared, schedule(), map_d, m, n);
  }
}

}  // namespace kernelcat
