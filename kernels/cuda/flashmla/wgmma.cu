// Latent attention on Hopper: 64 rows per thread block, keys by TMA (or cp.async), products by
// wgmma.
//
// The output is 64 x 512 floats: each of two consumer warpgroups accumulates half of the columns,
// over all tokens. KV tiles use two stages in turn, and the warpgroups take tiles in turn: one
// computes the scores of tile t, turns them into weights relative to the largest score so far, and
// passes the weights and the row max to the other one. While one works on its softmax, the tensor
// cores multiply the other's scores, and the weights of the tile before by the values (DeepSeek's
// "seesaw" scheduling). A stage is released in three parts, each as soon as it has been read, and
// the next scores begin with the piece that lands first.
//
// barrier                 | who arrives (how many)         | who waits     | for what
// ------------------------|--------------------------------|---------------|-----------------------
// queries_full            | producer (1), bytes of TMA     | consumers     | a segment, its queries
// queries_empty           | consumer threads (256)         | producer      | queries are multiplied
// queries_rope_empty      | consumer threads (256)         | producer      | weights[0] is free
// keys_full[stage][piece] | producer (1), bytes of TMA;    | warpgroup     | a piece of the keys
//                         | cp.async: kGatherThreads       | `stage`       | has landed
// rope_empty[stage]       | warps of warpgroup `stage` in  | producer      | rotated part was
//                         | the cluster (4 * kClusterSize) |               | read
// half_empty[stage][half] | warps of warpgroup `half` in   | producer      | half of the values was
//                         | the cluster (4 * kClusterSize) |               | read
// weights_full[w]         | threads of warpgroup w (128)   | the other one | weights, row max
// first_scores            | threads of warpgroup 0 (128)   | warpgroup 1   | first scores are done
// consumers               | consumer threads (256)         | consumers     | each other
#include <kernelcat/cluster.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/stage_release.cuh>

#include "latent_gatherer.cuh"
#include "latent_products.cuh"
#include "latent_result.cuh"

namespace kernelcat {

// Runs in consumer warpgroup kHalf, which accumulates half kHalf of the columns, and computes the
// scores of every second KV tile.
template <typename Tile, int kHalf>
struct LatentConsumer {
  using T = typename Tile::T;
  static constexpr int BLOCK_N = Tile::BLOCK_N, kOtherHalf = 1 - kHalf;
  static constexpr int kChunkBytes = Tile::kChunkBytes;
  using Result = LatentResult<Tile>;
  using Base = LatentRows<T, BLOCK_N>;
  using Scores = typename Base::Scores;
  using Weights = typename Base::Weights;
  static constexpr int kSteps = Base::kSteps;

  // softmax.row_max is that of all KV tiles so far, softmax.row_sum that of this warpgroup's.
  struct Rows : Base {
    uint32_t rope[kSteps][4];  // of the queries
  };

  // The phases of the barriers that a consumer waits for, as bits of one register. (A struct of
  // this register would change the machine code.)
  struct Phases {
    static constexpr uint32_t kKeys = 1, kSegment = 2, kOtherWeights = 4;

    static __device__ __forceinline__ uint32_t keys(uint32_t bits) { return bits & 1; }
    static __device__ __forceinline__ uint32_t segment(uint32_t bits) { return bits >> 1 & 1; }
    static __device__ __forceinline__ uint32_t other_weights(uint32_t bits) { return bits >> 2; }
  };

  LatentShared<Tile>& shared;
  const LatentArgs<T, T>& args;
  Result result;

  // Shared-memory address of the lane's row of four 8x8 matrices: 16 columns of a chunk, number
  // `step`.
  static __device__ __forceinline__ uint32_t matrices(const uint8_t* chunk, int step) {
    const int lane = lane_index(), row = warp_index() % 4 * 16 + lane % 16;
    return shared_address(chunk) + row * kRowBytes + ((2 * step + lane / 16) ^ row % 8) * 16;
  }

  // Starts scores = queries @ keys^T, chunk by chunk as keys land.
  __device__ __forceinline__ void multiply_keys(Rows& rows, Scores& scores, uint32_t phase) const {
    const uint64_t a = opaque(swizzled_rows_descriptor(shared_address(shared.queries[0])));
    const uint64_t b = opaque(swizzled_rows_descriptor(shared_address(shared.keys[kHalf][0])));
    Barrier* full = shared.keys_full[kHalf];
    full[0].wait(phase);
    if constexpr (Tile::kGathers) fence_async_shared();  // cp.async wrote what wgmma reads
    pin(scores);
    pin(rows.rope);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int at = Tile::kValueChunks * kChunkBytes + k * kWgmmaK * 2;
      WgmmaRs<T, BLOCK_N, OperandB::kRowsOfN>::multiply(scores, rows.rope[k], advanced(b, at),
                                                        k > 0);
    }
#pragma unroll
    for (int piece = 1; piece < Tile::kPieces; ++piece) {
      full[piece].wait(phase);
      if constexpr (Tile::kGathers) fence_async_shared();
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Tile::kPieceChunks; ++i) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const int at = Tile::chunk(kHalf, piece, i) * kChunkBytes + k * kWgmmaK * 2;
          Wgmma<T, BLOCK_N>::multiply(scores, advanced(a, at), advanced(b, at), true);
        }
      }
    }
    wgmma_commit();
    pin(scores);
  }

  // Starts rows.accumulators += weights @ this half of the values of a stage.
  __device__ __forceinline__ void multiply_values(Rows& rows, Weights& weights, int stage) const {
    rows.multiply_values(weights, shared.keys[stage][kHalf * Tile::kHalfChunks]);
  }

  // Starts rows.accumulators += the other warpgroup's weights @ values, once these weights are
  // here; `phase` is that of weights_full.
  __device__ __forceinline__ void multiply_other_tile(Rows& rows, Weights& weights,
                                                      uint32_t phase) const {
    shared.weights_full[kOtherHalf].wait(phase);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      load_matrices(weights[k], matrices(shared.weights[kOtherHalf], k));
    }
    float rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float row_max = shared.row_max[kOtherHalf][Result::row() + 8 * i];
      rescale[i] = rescale_factor(rows.softmax.row_max[i], row_max);
      rows.softmax.row_max[i] = row_max;
      rows.softmax.row_sum[i] *= rescale[i];
    }
    rows.rescale_accumulators(rescale);
    multiply_values(rows, weights, kOtherHalf);
  }

  // A KV tile of which this warpgroup computes the scores. Warpgroup 0 multiplies the other one's
  // weights after its own tile (in run()), warpgroup 1 while it works on its softmax: both stages
  // are then released as early as possible, and no values wait for the next keys. `segment_idx` is
  // the segment's number modulo 2, `weights_phase` the phase of the other one's weights_full.
  __device__ __forceinline__ void attend_own_tile(Rows& rows, const Segment& segment,
                                                  uint32_t segment_idx, int tile,
                                                  uint32_t keys_phase,
                                                  uint32_t weights_phase) const {
    Scores scores;
    Weights other_weights, weights;
    // The first scores of a segment are not multiplied at the same time as the second ones:
    // otherwise both warpgroups would work on their softmax at the same time, and the tensor cores
    // would be idle.
    if (kHalf == 1 && tile == segment.begin + 1) shared.first_scores.wait(segment_idx);
    multiply_keys(rows, scores, keys_phase);
    if constexpr (kHalf == 1) multiply_other_tile(rows, other_weights, weights_phase);
    wgmma_wait<kHalf>();
    pin(scores);
    pin(rows.rope);
    if (kHalf == 0 && tile == segment.begin) shared.first_scores.arrive();
    release_stage<Tile::kClusterSize>(shared.rope_empty[kHalf]);
    if (tile + 2 >= segment.end) shared.queries_empty.arrive();
    const int token = tile * BLOCK_N, remaining = segment.sequence.num_tokens - token;
    if (remaining > 0 && remaining < BLOCK_N) {
      clear_tokens<BLOCK_N>(shared.keys[kHalf][0], Tile::kValueChunks, remaining, kHalf);
    }
    float rescale[2];
    rows.exponentiate(scores, token, args.sm_scale * kLog2E, rescale);
    Rows::round(scores, weights);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      store_matrices(matrices(shared.weights[kHalf], k), weights[k]);
    }
    if (lane_index() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        shared.row_max[kHalf][Result::row() + 8 * i] = rows.softmax.row_max[i];
    }
    shared.weights_full[kHalf].arrive();
    if constexpr (kHalf == 1) {
      wgmma_wait<0>();
      pin(rows.accumulators);
      pin(other_weights);
      release_stage<Tile::kClusterSize>(shared.half_empty[kOtherHalf][kHalf]);
    }
    rows.rescale_accumulators(rescale);
    multiply_values(rows, weights, kHalf);
    wgmma_wait<0>();
    pin(rows.accumulators);
    pin(weights);
    release_stage<Tile::kClusterSize>(shared.half_empty[kHalf][kHalf]);
  }

  // A KV tile of which the other warpgroup computes the scores; `phase` is that of weights_full.
  __device__ __forceinline__ void attend_other_tile(Rows& rows, uint32_t phase) const {
    Weights other_weights;
    multiply_other_tile(rows, other_weights, phase);
    wgmma_wait<0>();
    pin(rows.accumulators);
    pin(other_weights);
    release_stage<Tile::kClusterSize>(shared.half_empty[kOtherHalf][kHalf]);
  }

  // The row statistics of all tokens, from the KV tiles of both warpgroups.
  __device__ __forceinline__ RowStats<2> row_stats(Rows& rows, ConsumerSync& sync_consumers) const {
    rows.softmax.reduce_row_sums();
    if (lane_index() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        shared.row_sum[kHalf][Result::row() + 8 * i] = rows.softmax.row_sum[i];
    }
    sync_consumers();
    RowStats<2> stats;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      stats.row_max[i] = rows.softmax.row_max[i];
      stats.row_sum[i] =
          shared.row_sum[0][Result::row() + 8 * i] + shared.row_sum[1][Result::row() + 8 * i];
    }
    return stats;
  }

  __device__ __forceinline__ void run() const {
    ConsumerSync sync_consumers = {.barrier = shared.consumers};
    uint32_t phases = 0;
    while (true) {
      const uint32_t segment_idx = Phases::segment(phases);
      shared.queries_full.wait(segment_idx);
      const Segment& segment = shared.segments[segment_idx];
      if (segment.begin == segment.end) break;
      Rows rows;
      rows.begin(segment, Result::row(), args.heads);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices(rows.rope[k], matrices(shared.weights[0], k));
      }
      // The queries' rotated part has been read; weights may overwrite it.
      sync_consumers();
      if (segment.begin + kHalf >= segment.end) {  // no own tile
        if (kHalf == 1 && Tile::kAlwaysWaits) shared.first_scores.wait(segment_idx);
        shared.queries_empty.arrive();
      }
      for (int tile = segment.begin + kHalf; tile < segment.end; tile += 2) {
        attend_own_tile(rows, segment, segment_idx, tile, Phases::keys(phases),
                        Phases::other_weights(phases));
        phases ^= kHalf == 1 ? Phases::kKeys | Phases::kOtherWeights : Phases::kKeys;
        if (kHalf == 0 && tile + 1 < segment.end) {
          attend_other_tile(rows, Phases::other_weights(phases));
          phases ^= Phases::kOtherWeights;
        }
      }
      if (kHalf == 1 && (segment.end - segment.begin) % 2 == 1) {
        attend_other_tile(rows, Phases::other_weights(phases));
        phases ^= Phases::kOtherWeights;
      }
      fence_async_shared();  // TMA writes where weights were
      shared.queries_rope_empty.arrive();
      result.finish(rows.accumulators, row_stats(rows, sync_consumers), segment, sync_consumers);
      phases ^= Phases::kSegment;
    }
  }
};

// The last thread block merges up to max_inline_parts partial results of a row; flashmla_combine
// merges more.
template <typename T, int kPageSize, int kRowTiles, int kClusterSize,
          typename Tile = LatentTile<T, kPageSize, kRowTiles, kClusterSize>>
__global__ void __launch_bounds__(Tile::kNumThreads, 1)
    flashmla_wgmma(const __grid_constant__ TensorMap map_q,   // (tokens * heads, 576)
                   const __grid_constant__ TensorMap map_kv,  // (slots, 576)
                   const T* q,                                // (tokens, heads, 576)
                   const T* kv_cache,                         // (pages, page_size, 576)
                   const int* block_table,                    // (batch, table_width)
                   const int* kv_lens,                        // (batch,)
                   const int* cu_q,                           // (batch + 1,)
                   T* out,                                    // (tokens, heads, 512)
                   float* lse,                                // (tokens, heads)
                   float* partials,                           // PartialResults::slots
                   uint32_t* counters,  // (teams, thread blocks of a team), zero before and after
                   CombineTask* tasks,  // (teams,)
                   int batch, int heads, int table_width, float sm_scale, int num_slots,
                   int min_tiles, int max_inline_parts) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;  // to a swizzle atom
  auto& shared = *reinterpret_cast<LatentShared<Tile>*>(dynamic_shared + padding);
  if (threadIdx.x == 0) {
    prefetch_map(map_q);
    prefetch_map(map_kv);
    constexpr int kWarps = kWarpgroupThreads / kWarpThreads;  // of a warpgroup
    shared.queries_full.init(1);
    shared.queries_empty.init(Tile::kConsumerThreads);
    shared.queries_rope_empty.init(Tile::kConsumerThreads);
    for (Barrier& full : shared.weights_full) full.init(kWarpgroupThreads);
    shared.first_scores.init(kWarpgroupThreads);
    shared.consumers.init(Tile::kConsumerThreads);
    for (int stage = 0; stage < 2; ++stage) {
      for (Barrier& full : shared.keys_full[stage]) full.init(Tile::kArrivals);
      shared.rope_empty[stage].init(kWarps * kClusterSize);
      for (Barrier& empty : shared.half_empty[stage]) empty.init(kWarps * kClusterSize);
    }
    fence_barrier_init();
  }
  if constexpr (kClusterSize > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }
  const typename Tile::List list = {
      .kv_lens = kv_lens, .cu_q = cu_q, .batch = batch, .heads = heads};
  list.prefetch(block_table, table_width);
  grid_dependency_wait();
  launch_dependents();

  const int team = blockIdx.x / kRowTiles, rank = blockIdx.x % kRowTiles;
  WorkCursor<typename Tile::List> first;
  const WorkPartition partition =
      shared.planner.partition(list, gridDim.x / kRowTiles, min_tiles, team, first);
  if (rank == 0 && threadIdx.x == 0) tasks[team].num_parts = 0;
  if (team < partition.num_teams) {
    const int warpgroup = warp_index() / 4;
    const LatentArgs<T, T> args = {.q = q,
                                   .kv_cache = kv_cache,
                                   .block_table = block_table,
                                   .kv_lens = kv_lens,
                                   .cu_q = cu_q,
                                   .out = out,
                                   .lse = lse,
                                   .batch = batch,
                                   .heads = heads,
                                   .table_width = table_width,
                                   .sm_scale = sm_scale};
    const LatentResults<Tile> results = {.args = args,
                                         .partials = {.slots = partials},
                                         .counters = counters,
                                         .tasks = tasks,
                                         .is_last = &shared.is_last,
                                         .max_inline_parts = max_inline_parts,
                                         .team = team,
                                         .rank = rank};
    if (warpgroup == 2) {
      decrease_registers<Tile::kProducerRegisters>();
      const LatentProducer<Tile> producer = {.shared = shared,
                                             .map_q = map_q,
                                             .map_kv = map_kv,
                                             .block_table = block_table,
                                             .heads = heads,
                                             .table_width = table_width,
                                             .num_slots = num_slots,
                                             .rank = rank};
      const LatentSchedule<Tile> schedule = {
          .list = list, .partition = partition, .team = team, .rank = rank};
      if constexpr (Tile::kGathers) {
        LatentGatherer<Tile>{producer, kv_cache}.run(schedule, first);
      } else if (warp_index() % 4 == 0) {
        producer.run(schedule, first);
      }
    } else {
      increase_registers<Tile::kConsumerRegisters>();
      if (warpgroup == 0) {
        LatentConsumer<Tile, 0>{shared, args, {results, /*half=*/0, /*first=*/0}}.run();
      } else {
        LatentConsumer<Tile, 1>{shared, args, {results, /*half=*/1, /*first=*/0}}.run();
      }
    }
  }
  // A thread block must not exit while others of the cluster may still release its stages.
  if constexpr (kClusterSize > 1) cluster_sync();
}

}  // namespace kernelcat
