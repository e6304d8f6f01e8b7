// D = activation(A @ B^T + bias) + residual on Hopper by split-K in clusters: the thread blocks of
// a cluster have the same tile and multiply a part of its k range each, with the ring, the products
// and the stores of the wgmma kernel. Their sums meet in shared memory and not in L2, and each
// thread block finishes a slice of the tile's columns.
//
// barrier     | who arrives (how many)               | who waits   | for what
// full[s]     | producer, with the stage's bytes (1) | consumers   | stage s holds its k-block
// empty[s]    | consumer warps (see init)            | producer    | stage s has been read
// cluster     | all threads, once                    | all threads | rings are free for sums
// arrived[c]  | a thread of consumer c (1)           | consumer c  | sums from the whole cluster
// named 1 + c | threads of consumer c (128)          | consumer c  | its chunks and bias
//
// arrived[c] also waits for the bytes of the sums. The cluster barrier comes before the first
// access to another thread block, and so its mbarriers are initialised, too. At the end no barrier
// is needed: a thread block waits for all stores into its own shared memory.
#include <kernelcat/remote_store.cuh>

#include "wgmma_product.cuh"

namespace kernelcat {

// A tile whose k range the kSplits thread blocks of a cluster split. Each finishes a slice of the
// columns (with kSwap of Z^T), and only a slice leaves through its chunks.
template <typename Tile, typename Slice_, int kSplits_>
struct ClusterSplitTile : Tile {
  using Slice = Slice_;  // a WgmmaTile as well
  static constexpr int kSplits = kSplits_;
  static constexpr int kChunkBytes = Slice::kChunkBytes, kTileBias = Slice::kTileBias;
  static_assert(Slice::BLOCK_N * kSplits == Tile::BLOCK_N && !Tile::kPingpong && Tile::kSplit);
};

// The sums of a slice from each thread block of the cluster, in the order of accumulators.
template <typename Config>
struct SliceSums {
  static constexpr int kFours = Config::Slice::BLOCK_N / 8;  // of a thread, from a wgmma
  float4 sums[Config::kNumConsumers][Config::kSplits][Config::kNumWgmmas][kFours]
             [kWarpgroupThreads];
};

// After the sums the ring is not used again, so they lie in its place.
template <typename Config>
struct ClusterSplitShared : WgmmaShared<Config> {
  Barrier arrived[Config::kNumConsumers];

  __device__ __forceinline__ SliceSums<Config>& slice_sums() {
    static_assert(sizeof(SliceSums<Config>) <= sizeof(WgmmaShared<Config>::stages),
                  "sums fit into the ring");
    return *reinterpret_cast<SliceSums<Config>*>(this->stages);
  }
};

// Sends each slice of this thread block's `sums` to the thread block that finishes it, and returns
// this thread block's slice of the product: all splits' sums, added up in the order of k. All
// threads of consumer `consumer` call this together, after the cluster barrier.
template <typename Config>
__device__ __forceinline__ void add_up_slice(typename Config::Slice::Accumulators& slice,
                                             const typename Config::Accumulators& sums,
                                             ClusterSplitShared<Config>& shared, int consumer,
                                             int split) {
  using Sums = SliceSums<Config>;
  auto& received = shared.slice_sums().sums[consumer];
  Barrier& arrived = shared.arrived[consumer];
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (thread == 0) arrived.arrive_expect(sizeof(received));
  // Thread blocks take turns as receivers, lest all send to one at the same time.
#pragma unroll
  for (int i = 0; i < Config::kNumWgmmas; ++i) {
#pragma unroll
    for (int four = 0; four < Sums::kFours; ++four) {
#pragma unroll
      for (int owner = 0; owner < Config::kSplits; ++owner) {
        const float* z = &sums[i][4 * (owner * Sums::kFours + four)];
        store_remote(&received[split][i][four][thread], float4{z[0], z[1], z[2], z[3]}, arrived,
                     owner);
      }
    }
  }
  arrived.wait(0);
#pragma unroll
  for (int i = 0; i < Config::kNumWgmmas; ++i) {
#pragma unroll
    for (int four = 0; four < Sums::kFours; ++four) {
      float4 total = received[0][i][four][thread];
#pragma unroll
      for (int s = 1; s < Config::kSplits; ++s) {
        const float4 more = received[s][i][four][thread];
        total = {total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w};
      }
      float* z = &slice[i][4 * four];
      z[0] = total.x, z[1] = total.y, z[2] = total.z, z[3] = total.w;
    }
  }
}

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume_split(ClusterSplitShared<Config>& shared,
                                              const BlockSchedule<Config>& schedule,
                                              const TensorMap& map_d,
                                              const typename Config::Output& output) {
  using Slice = typename Config::Slice;
  const int consumer = warp_index() / 4;
  auto& shared_bias = shared.bias[consumer];
  const WorkItem work = schedule[schedule.first()];
  const int row = schedule.row_of(work.tile) + consumer * Config::kRows;
  const int col = schedule.col_of(work.tile) + work.split * Slice::BLOCK_N;
  TileBias<typename Config::T, Slice::kTileBias> bias(output.bias, Config::kSwap ? row : col,
                                                      output.n);
  PipelineState<Config::kNumStages> position;
  typename Config::Accumulators sums;
  accumulate<Config>(shared, schedule.rank, position, sums, consumer, work.k_end - work.k_begin);
  cluster_arrive_relaxed();
  bias.store(shared_bias);
  cluster_wait();
  typename Slice::Accumulators slice;
  add_up_slice<Config>(slice, sums, shared, consumer, work.split);
  store_tile<Slice>(shared.chunks[consumer], slice, map_d, output, shared_bias, row, col,
                    1 + consumer);
  if (Config::kTmaStore) wait_stores_read<0>();
}

// m and n are those of Z. With kSwap the operands change places: map_a is B's and map_b A's. A
// cluster has kSplits thread blocks, and the grid one for each split of each tile. `map_d` is read
// only with kTmaStore.
template <typename T, int BLOCK_M, int BLOCK_N, int kNumStages, bool kSwap, int kSplits,
          bool kTmaStore, Activation kActivation, bool kResidual,
          typename Tile = WgmmaTile<T, BLOCK_M, BLOCK_N, kNumStages, false, kSwap, 1, 1, true,
                                    kTmaStore, kActivation, kResidual, kRowBytes / 2>,
          typename Slice = WgmmaTile<T, BLOCK_M, BLOCK_N / kSplits, kNumStages, false, kSwap, 1, 1,
                                     true, kTmaStore, kActivation, kResidual, kRowBytes / 2>,
          typename Config = ClusterSplitTile<Tile, Slice, kSplits>>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kBlocksPerSm)
    gemm_cluster_split(const __grid_constant__ TensorMap map_a,  // (m, k), boxes BLOCK_M high
                       const __grid_constant__ TensorMap map_b,  // (n, k), boxes BLOCK_N high
                       const __grid_constant__ TensorMap map_d,  // d, boxes of a slice's chunks
                       const T* bias,                            // (n,) or null
                       const T* residual,                        // (m, columns of d) or null
                       T* d,  // (m, n), or (m, n / 2) for kSwiglu
                       int m, int n, int k, int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<ClusterSplitShared<Config>*>(dynamic_shared + padding);
  // A lambda that each role calls, as in wgmma.cu. A split of a tile is a cluster's thread block.
  const auto schedule = [&] { return BlockSchedule<Config>::of(m, n, k, 0, kSplits, group_m); };

  if (threadIdx.x == 0) {
    prefetch_map(map_a);
    prefetch_map(map_b);
    if (kTmaStore) prefetch_map(map_d);
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) barrier.init(Config::kNumConsumers * 4);
    for (Barrier& barrier : shared.arrived) barrier.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  grid_dependency_wait();

  if (warp_index() / 4 == Config::kNumConsumers) {
    if constexpr (Config::kReallocate) decrease_registers<Config::kProducerRegisters>();
    if (warp_index() % 4 == 0 && elect_one())
      produce_operands<Config>(shared, schedule(), map_a, map_b);
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    if constexpr (Config::kReallocate) increase_registers<Config::kConsumerRegisters>();
    consume_split<Config>(shared, schedule(), map_d,
                          {.d = d, .bias = bias, .m = m, .n = n, .residual = residual});
  }
}

}  // namespace kernelcat
