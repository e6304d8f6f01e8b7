// D = A @ B^T on Hopper by clusters of thread blocks, which compute CLUSTER_M x CLUSTER_N adjacent
// tiles: tiles in a row of the cluster need the same rows of A, tiles in a column the same rows of
// B. A template argument says how a shared operand reaches every thread block that needs it; the
// rest of the persistent, warp-specialized kernel does not depend on the argument, so that a
// measured difference is due to the transfer.
//
// A shared operand is loaded in slices, one by each thread block, which are multicast to the
// sharers, and a stage is filled again after the consumers of all sharers have released it: both
// are CUTLASS's.
//
// barrier     | who arrives (how many)               | who waits   | for what
// full[s]     | producer; with kDsmem the relay (1)  | consumers   | stage s holds its k-block
// landed[s]   | producer, with kDsmem only (1)       | relay       | this block's slices are loaded
// empty[s]    | consumer warps of all peers (8 each) | producer    | stage s has been read
// named 1 + c | threads of consumer c (128)          | consumer c  | its chunk is free, or written
// cluster     | all threads, at the start            | all threads | mbarriers are initialised
//
// full[s] and landed[s] also wait for bytes. Peers of a thread block are itself and the thread
// blocks that it exchanges slices with (none with kUnicast). The relay is a thread that copies
// slices to the peers.
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/cluster.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/tile_order.cuh>
#include <kernelcat/wgmma_stage.cuh>

namespace kernelcat {

enum class Transfer {
  kUnicast,    // every thread block loads its operands whole
  kMulticast,  // a thread block loads a slice, and TMA writes the slice to all sharers
  kDsmem,      // a thread block loads a slice, and copies it from its shared memory to the sharers
};

// What is known at compile time. A consumer warpgroup computes kRows rows of the tile.
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
  static constexpr int kNumWgmmas = kRows / kWgmmaM;  // of 64 rows each

  // Thread blocks that share an operand, and the slice of the operand that each of them loads.
  static constexpr int kSharersA = kShares ? CLUSTER_N : 1, kSharersB = kShares ? CLUSTER_M : 1;
  static constexpr int kNumPeers = kSharersA + kSharersB - 1;  // with this thread block
  static constexpr int kBytesA = BLOCK_M * kRowBytes, kBytesB = BLOCK_N * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kSliceRowsA = BLOCK_M / kSharersA, kSliceRowsB = BLOCK_N / kSharersB;
  static constexpr int kSliceBytesA = kBytesA / kSharersA, kSliceBytesB = kBytesB / kSharersB;

  // D is stored in chunks of 64 x 64, through two buffers for each consumer.
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
  Barrier full[Config::kNumStages];
  Barrier empty[Config::kNumStages];
  Barrier landed[Config::kNumStages];
};

// Where a thread block is in its cluster, and which slices it loads.
template <typename Config>
struct ClusterPosition {
  int m, n;

  static __device__ __forceinline__ ClusterPosition of_this_block() {
    const int rank = static_cast<int>(cluster_rank());
    return {rank % Config::CLUSTER_M, rank / Config::CLUSTER_M};
  }
  static __device__ __forceinline__ uint32_t rank_of(int m, int n) {
    return n * Config::CLUSTER_M + m;
  }

  __device__ __forceinline__ int slice_a() const { return Config::kShares ? n : 0; }
  __device__ __forceinline__ int slice_b() const { return Config::kShares ? m : 0; }

  // One bit for each thread block in this row, or this column, of the cluster.
  __device__ __forceinline__ uint16_t row_mask() const {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < Config::CLUSTER_N; ++i) mask |= 1u << rank_of(m, i);
    return static_cast<uint16_t>(mask);
  }
  __device__ __forceinline__ uint16_t column_mask() const {
    return static_cast<uint16_t>(((1u << Config::CLUSTER_M) - 1) << rank_of(0, n));
  }

  // The rank of peer `i` of kNumPeers: first the thread blocks of this column, this thread block
  // among them, then the others of this row.
  __device__ __forceinline__ uint32_t peer(int i) const {
    if (i < Config::CLUSTER_M) return rank_of(i, n);
    const int in_row = i - Config::CLUSTER_M;
    return rank_of(m, in_row + (in_row >= n));
  }
};

// The tiles that a thread block computes, in their order. The thread blocks of a cluster compute
// adjacent tiles at the same time. A thread block whose tile lies outside of D works nevertheless,
// because its peers need what it loads.
template <typename Config>
struct Schedule {
  int num_m, num_n;  // cluster tiles
  int num_k;         // k-blocks
  int group_m;       // rows of cluster tiles in a group: see grouped_tile

  __device__ __forceinline__ Schedule(int m, int n, int k, int group_m)
      : num_m(ceil_div(m, Config::BLOCK_M * Config::CLUSTER_M)),
        num_n(ceil_div(n, Config::BLOCK_N * Config::CLUSTER_N)),
        num_k(ceil_div(k, BLOCK_K)),
        group_m(group_m) {}

  static __device__ __forceinline__ int first() { return blockIdx.x / Config::kClusterSize; }
  static __device__ __forceinline__ int step() { return gridDim.x / Config::kClusterSize; }
  __device__ __forceinline__ int size() const { return num_m * num_n; }

  __device__ __forceinline__ Tile tile(int index, ClusterPosition<Config> block) const {
    const Tile cluster_tile = grouped_tile(index, num_m, num_n, group_m);
    return {cluster_tile.m * Config::CLUSTER_M + block.m,
            cluster_tile.n * Config::CLUSTER_N + block.n};
  }
};

// Starts the loads of this thread block's slices of a stage. The tile begins at row `row` of A and
// at row `col` of B.
template <typename Config>
__device__ __forceinline__ void load_slices(uint8_t* stage, const TensorMap& map_a,
                                            const TensorMap& map_b, int k, int row, int col,
                                            ClusterPosition<Config> block, Barrier& barrier) {
  constexpr bool kMulticast = Config::kTransfer == Transfer::kMulticast;
  uint8_t* a = stage + block.slice_a() * Config::kSliceBytesA;
  uint8_t* b = stage + Config::kBytesA + block.slice_b() * Config::kSliceBytesB;
  row += block.slice_a() * Config::kSliceRowsA;
  col += block.slice_b() * Config::kSliceRowsB;
  if constexpr (kMulticast && Config::kSharersA > 1) {
    tensor_load_multicast(a, map_a, k, row, barrier, block.row_mask(), kDefaultPolicy);
  } else {
    tensor_load(a, map_a, k, row, barrier, kDefaultPolicy);
  }
  if constexpr (kMulticast && Config::kSharersB > 1) {
    tensor_load_multicast(b, map_b, k, col, barrier, block.column_mask(), kDefaultPolicy);
  } else {
    tensor_load(b, map_b, k, col, barrier, kDefaultPolicy);
  }
}

// The producer; runs in one thread. It fills a stage, here and in the peers, after all thread
// blocks that it writes to have released the stage. The bytes that a full barrier counts in a phase
// are therefore bytes of this phase, but peers' bytes may arrive before this thread's arrival.
template <typename Config>
__device__ __forceinline__ void produce(ClusterShared<Config>& shared,
                                        const Schedule<Config>& schedule, const TensorMap& map_a,
                                        const TensorMap& map_b) {
  constexpr bool kDsmem = Config::kTransfer == Transfer::kDsmem;
  constexpr int kBytes = kDsmem ? Config::kSliceBytesA + Config::kSliceBytesB : Config::kStageBytes;
  const auto block = ClusterPosition<Config>::of_this_block();
  PipelineState<Config::kNumStages> position;
  for (int index = schedule.first(); index < schedule.size(); index += schedule.step()) {
    const Tile tile = schedule.tile(index, block);
    for (int k_block = 0; k_block < schedule.num_k; ++k_block) {
      const int stage = position.stage;
      shared.empty[stage].wait(position.phase ^ 1);
      Barrier& barrier = kDsmem ? shared.landed[stage] : shared.full[stage];
      barrier.arrive_expect(kBytes);
      load_slices<Config>(shared.stages[stage], map_a, map_b, k_block * BLOCK_K,
                          tile.m * Config::BLOCK_M, tile.n * Config::BLOCK_N, block, barrier);
      position.advance();
    }
  }
  // A thread block must not exit while peers may still arrive at its empty barriers.
  for (int i = 0; i < Config::kNumStages; ++i) {
    shared.empty[position.stage].wait(position.phase ^ 1);
    position.advance();
  }
}

// The relay, kDsmem only; runs in one thread. Copies this thread block's slices of each stage to
// the peers as soon as the slices have been loaded.
template <typename Config>
__device__ __forceinline__ void relay_slices(ClusterShared<Config>& shared,
                                             const Schedule<Config>& schedule) {
  constexpr int kPeerBytes = Config::kStageBytes - Config::kSliceBytesA - Config::kSliceBytesB;
  const auto block = ClusterPosition<Config>::of_this_block();
  PipelineState<Config::kNumStages> position;
  for (int index = schedule.first(); index < schedule.size(); index += schedule.step()) {
    for (int k_block = 0; k_block < schedule.num_k; ++k_block) {
      Barrier& full = shared.full[position.stage];
      const uint8_t* stage = shared.stages[position.stage];
      const uint8_t* a = stage + block.slice_a() * Config::kSliceBytesA;
      const uint8_t* b = stage + Config::kBytesA + block.slice_b() * Config::kSliceBytesB;
      shared.landed[position.stage].wait(position.phase);
      full.arrive_expect(kPeerBytes);
#pragma unroll
      for (int i = 0; i < Config::CLUSTER_N; ++i) {
        if (i != block.n)
          bulk_copy_to_peer(a, Config::kSliceBytesA, full, block.rank_of(block.m, i));
      }
#pragma unroll
      for (int i = 0; i < Config::CLUSTER_M; ++i) {
        if (i != block.m)
          bulk_copy_to_peer(b, Config::kSliceBytesB, full, block.rank_of(i, block.n));
      }
      position.advance();
    }
  }
}

// Releases a stage, for a warp: arrives at the empty barrier of every thread block that writes into
// the stage.
template <typename Config>
__device__ __forceinline__ void release_to_peers(Barrier& empty, ClusterPosition<Config> block) {
  if constexpr (Config::kNumPeers == 1) {
    if (lane_index() == 0) empty.arrive();
  } else {
    if (lane_index() < Config::kNumPeers) arrive_remote(empty, block.peer(lane_index()));
  }
}

// Multiplies one tile. A stage is released after the wgmmas of the next stage have been started.
template <typename Config>
__device__ __forceinline__ void accumulate(ClusterShared<Config>& shared,
                                           PipelineState<Config::kNumStages>& position,
                                           typename Config::Accumulators& sums, int consumer,
                                           int num_k, ClusterPosition<Config> block) {
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
      release_to_peers<Config>(shared.empty[previous], block);
    }
    previous = stage;
    position.advance();
  }
  wgmma_wait<0>();
  pin(sums);
  release_to_peers<Config>(shared.empty[previous], block);
}

// Rounds 64 x kChunkCols sums, from column `first` of the tile on, and writes them to a swizzled
// buffer.
template <typename Config>
__device__ __forceinline__ void write_chunk(uint8_t* chunk,
                                            const float (&sums)[Config::BLOCK_N / 2], int first) {
  constexpr int kSpan = Config::kChunkCols * 2;
  const int lane = lane_index();
  const int row = warp_index() % 4 * 16 + lane % 16;  // the row whose address this lane passes
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

// Stores the sums through shared memory, chunk by chunk in two buffers. One thread starts the
// stores, and the last two may still run while the next tile is computed.
template <typename Config>
__device__ __forceinline__ void store_tile(uint8_t (&chunks)[2][Config::kChunkBytes],
                                           const typename Config::Accumulators& sums,
                                           const TensorMap& map_d, int m, int n, int row, int col,
                                           int barrier) {
  const bool is_leader = threadIdx.x % kWarpgroupThreads == 0;
  constexpr int kNumChunks = Config::kNumWgmmas * Config::kChunksPerRow;
  // With an odd number of chunks, the last chunk of a tile and the first one of the next tile use
  // the same buffer.
  if (is_leader && kNumChunks % 2 == 1) wait_stores_read<0>();
#pragma unroll
  for (int i = 0; i < kNumChunks; ++i) {
    const int first = i % Config::kChunksPerRow * Config::kChunkCols;
    const int chunk_row = row + i / Config::kChunksPerRow * kWgmmaM, chunk_col = col + first;
    uint8_t* chunk = chunks[i % 2];
    if (is_leader) wait_stores_read<1>();
    named_barrier_sync(barrier, kWarpgroupThreads);
    write_chunk<Config>(chunk, sums[i / Config::kChunksPerRow], first);
    fence_async_shared();
    named_barrier_sync(barrier, kWarpgroupThreads);
    if (is_leader) {
      if (chunk_row < m && chunk_col < n) {
        tensor_store(map_d, chunk, chunk_col, chunk_row, kDefaultPolicy);
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
  const auto block = ClusterPosition<Config>::of_this_block();
  PipelineState<Config::kNumStages> position;
  for (int index = schedule.first(); index < schedule.size(); index += schedule.step()) {
    const Tile tile = schedule.tile(index, block);
    typename Config::Accumulators sums;
    accumulate<Config>(shared, position, sums, consumer, schedule.num_k, block);
    store_tile<Config>(shared.chunks[consumer], sums, map_d, m, n,
                       tile.m * Config::BLOCK_M + consumer * Config::kRows,
                       tile.n * Config::BLOCK_N, 1 + consumer);
  }
  wait_stores_read<0>();
}

// Launched in clusters of CLUSTER_M * CLUSTER_N thread blocks along x.
template <typename T, int BLOCK_M, int BLOCK_N, int CLUSTER_M, int CLUSTER_N, int kNumStages,
          Transfer kTransfer>
__global__ void __launch_bounds__(3 * kWarpgroupThreads, 1)
    multicast_gemm(const __grid_constant__ TensorMap map_a,  // (m, k), boxes of a slice x BLOCK_K
                   const __grid_constant__ TensorMap map_b,  // (n, k), boxes of a slice x BLOCK_K
                   const __grid_constant__ TensorMap map_d,  // (m, n), boxes of 64 x 64
                   int m, int n, int k, int group_m) {
  using Config = ClusterTile<T, BLOCK_M, BLOCK_N, CLUSTER_M, CLUSTER_N, kNumStages, kTransfer>;
  extern __shared__ uint8_t dynamic_shared[];
  // The padding is the same in every thread block, and so are the offsets of what peers write to.
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<ClusterShared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls: values that live across setmaxnreg were seen to spill.
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
    const int role = warp_index() % 4;  // outside the branches: all lanes must call warp_index()
    if (role == 0 && elect_one()) {
      prefetch_map(map_a);
      prefetch_map(map_b);
      produce<Config>(shared, schedule(), map_a, map_b);
    }
    if (kTransfer == Transfer::kDsmem && role == 1 && elect_one()) {
      relay_slices<Config>(shared, schedule());
    }
  } else {
    increase_registers<232>();
    consume<Config>(shared, schedule(), map_d, m, n);
  }
}

}  // namespace kernelcat
