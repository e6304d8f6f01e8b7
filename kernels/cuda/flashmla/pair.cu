// Latent attention of 64 or 128 rows on Hopper by clusters of two thread blocks, which have half of
// the columns each.
//
// Both thread blocks have all rows, and of a KV tile the 256 latent columns of their half of the
// output: each byte of the cache is read by one SM only, and a KV tile takes half of the shared
// memory. Scores need all columns, so each thread block computes the softmax of 64 of the rows: the
// peer sends what its columns add to the scores of these rows, and receives their weights. Both go
// from the registers of a thread to the same thread of the peer through distributed shared memory.
// The warpgroup that computes the softmax multiplies the next keys before it works on the softmax;
// the other warpgroup sends its scores one KV tile ahead, so that no warpgroup waits for the way
// there and back.
//
// barrier            | who arrives (how many)        | who waits      | for what
// -------------------|-------------------------------|----------------|-----------------------
// queries_full       | producer (1), bytes of TMA    | consumers      | a segment, its queries
// queries_empty      | consumer threads              | producer       | products are done
//                    | (kConsumerThreads)            |                |
// keys_full[stage]   | producer (1), bytes of TMA;   | consumers      | keys in 16 bits
//                    | packed: its threads (128)     |                |
// packed_full[stage] | producer (1), bytes of TMA    | producer warps | packed rows
// keys_empty[stage]  | consumer warps                | producer       | values were read
//                    | (4 * kWarpgroups)             |                |
// scores_full,       | thread of the receiving       | receiving      | data of the peer
// weights_full       | warpgroup (1), peer's bytes   | warpgroup      |
// scores_empty,      | warps of the peer's receiving | sending        | room at the peer
// weights_empty      | warpgroup (4)                 | warpgroup      |
// consumers          | consumer threads              | consumers      | each other
//                    | (kConsumerThreads)            |                |
#include <kernelcat/cluster.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/remote_store.cuh>

#include "latent_products.cuh"
#include "latent_result.cuh"
#include "pair_unpacker.cuh"

namespace kernelcat {

// Runs in a consumer warpgroup. kSoftmax: whether this thread block computes the softmax of its
// rows.
template <typename Tile, bool kSoftmax>
struct PairConsumer {
  using T = typename Tile::T;
  static constexpr int BLOCK_N = Tile::BLOCK_N, kChunkBytes = Tile::kChunkBytes;
  using Rows = LatentRows<T, BLOCK_N>;
  using Scores = typename Rows::Scores;
  using Weights = typename Rows::Weights;
  using Result = LatentResult<Tile>;
  using Position = PipelineState<Tile::kNumStages>;
  static constexpr int kSteps = Rows::kSteps;

  PairShared<Tile>& shared;
  const LatentArgs<T, typename Tile::Cached>& args;
  Result result;
  int warpgroup, peer;

  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  // Starts scores = queries @ keys^T over this thread block's columns, and over the rotated part
  // where the softmax is computed.
  __device__ __forceinline__ void multiply_keys(Scores& scores, const Position& at) const {
    shared.keys_full[at.stage].wait(at.phase);
    const uint8_t* rows = shared.queries[warpgroup][0];
    const uint64_t a = opaque(swizzled_rows_descriptor(shared_address(rows)));
    const uint64_t b = opaque(swizzled_rows_descriptor(shared_address(shared.keys[at.stage][0])));
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kValueChunks * kSteps; ++step) {
      const int offset = step / kSteps * kChunkBytes + step % kSteps * kWgmmaK * 2;
      Wgmma<T, BLOCK_N>::multiply(scores, advanced(a, offset), advanced(b, offset), step > 0);
    }
    if constexpr (kSoftmax) {
      const uint64_t rope = opaque(swizzled_rows_descriptor(shared_address(shared.queries_rope)));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int offset = step * kWgmmaK * 2;
        Wgmma<T, BLOCK_N>::multiply(scores, advanced(rope, offset),
                                    advanced(b, Tile::kRopeChunk * kChunkBytes + offset), true);
      }
    }
    wgmma_commit();
    pin(scores);
  }

  // Arrives at a barrier of the peer after what the peer sent has been read. The fence orders loads
  // in flight before the peer's next stores.
  __device__ __forceinline__ void release_stage_remote(Barrier& empty) const {
    fence_async_shared();
    __syncwarp();
    if (lane_index() == 0) arrive_remote(empty, peer);
  }

  // Waits until the bytes that the peer sends are here.
  __device__ __forceinline__ void receive(Barrier& full, int num_bytes, uint32_t phase) const {
    if (thread() == 0) full.arrive_expect(num_bytes);
    full.wait(phase);
  }

  __device__ __forceinline__ void send_scores(const Scores& scores, uint32_t phase) const {
    shared.scores_empty.wait(phase ^ 1);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; ++i) {
      const float4 four = {scores[4 * i], scores[4 * i + 1], scores[4 * i + 2], scores[4 * i + 3]};
      store_remote(&shared.scores[i][thread()], four, shared.scores_full, peer);
    }
  }

  __device__ __forceinline__ void take_scores(Scores& scores, uint32_t phase) const {
    receive(shared.scores_full, sizeof(shared.scores), phase);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; ++i) {
      const float4 four = shared.scores[i][thread()];
      scores[4 * i] += four.x, scores[4 * i + 1] += four.y;
      scores[4 * i + 2] += four.z, scores[4 * i + 3] += four.w;
    }
    release_stage_remote(shared.scores_empty);
  }

  __device__ __forceinline__ void send_weights(const Weights& weights,
                                               const RunningSoftmax& softmax,
                                               uint32_t phase) const {
    shared.weights_empty.wait(phase ^ 1);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 words = {weights[k][0], weights[k][1], weights[k][2], weights[k][3]};
      store_remote(&shared.weights[k][thread()], words, shared.weights_full, peer);
    }
    const float4 stats = {softmax.row_max[0], softmax.row_max[1], softmax.row_sum[0],
                          softmax.row_sum[1]};
    store_remote(&shared.stats[thread()], stats, shared.weights_full, peer);
  }

  __device__ __forceinline__ void take_weights(Weights& weights, RunningSoftmax& softmax,
                                               float (&rescale)[2], uint32_t phase) const {
    receive(shared.weights_full, sizeof(shared.weights) + sizeof(shared.stats), phase);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 words = shared.weights[k][thread()];
      weights[k][0] = words.x, weights[k][1] = words.y;
      weights[k][2] = words.z, weights[k][3] = words.w;
    }
    const float4 stats = shared.stats[thread()];
    release_stage_remote(shared.weights_empty);
    rescale[0] = rescale_factor(softmax.row_max[0], stats.x),
    rescale[1] = rescale_factor(softmax.row_max[1], stats.y);
    softmax.row_max[0] = stats.x, softmax.row_max[1] = stats.y;
    softmax.row_sum[0] = stats.z, softmax.row_sum[1] = stats.w;
  }

  // Starts rows.accumulators += weights @ values of a KV tile, of which the sequence has
  // `remaining` tokens.
  __device__ __forceinline__ void add_values(Rows& rows, Weights& weights,
                                             const float (&rescale)[2], int remaining,
                                             int stage) const {
    uint8_t* values = shared.keys[stage][0];
    if (remaining > 0 && remaining < BLOCK_N) {
      clear_tokens<BLOCK_N>(values, Tile::kValueChunks, remaining, warpgroup);
    }
    rows.rescale_accumulators(rescale);
    rows.multiply_values(weights, values);
  }

  // Waits for all products but the last kPending. (Under a condition, ptxas takes accumulators for
  // read while they are written, and waits for every product by itself.)
  template <int kPending>
  static __device__ __forceinline__ void wait(Rows& rows, Scores& scores, Weights& weights) {
    wgmma_wait<kPending>();
    pin(rows.accumulators);
    pin(scores);
    pin(weights);
  }

  // Releases a stage whose values have been multiplied; nothing if `stage` is negative.
  __device__ __forceinline__ void release_stage(int stage) const {
    if (stage >= 0 && lane_index() == 0) shared.keys_empty[stage].arrive();
  }

  // The KV tiles of a segment, if this thread block computes the softmax: the products of the next
  // KV tile's keys and of this one's values follow each other, and the values' runs during the next
  // softmax. `next` and `at` are the stages of the next keys and of the values; `phase` is that of
  // the exchange.
  __device__ __forceinline__ void attend_with_softmax(Rows& rows, const Segment& segment,
                                                      Position& next, Position& at,
                                                      uint32_t& phase) const {
    Scores scores;
    Weights weights;
    int values_stage = -1;  // the stage whose values are being multiplied
    multiply_keys(scores, next);
    next.advance();
    wait<0>(rows, scores, weights);
    for (int tile = segment.begin; tile < segment.end; ++tile) {
      const int token = tile * BLOCK_N;
      float rescale[2];
      take_scores(scores, phase);
      rows.exponentiate(scores, token, args.sm_scale * kLog2E, rescale);
      wait<0>(rows, scores, weights);
      release_stage(values_stage);
      Rows::round(scores, weights);
      send_weights(weights, rows.softmax, phase);
      if (tile + 1 < segment.end) {
        multiply_keys(scores, next);
        next.advance();
      }
      add_values(rows, weights, rescale, segment.sequence.num_tokens - token, at.stage);
      wait<1>(rows, scores, weights);
      values_stage = at.stage;
      at.advance();
      phase ^= 1;
    }
    wait<0>(rows, scores, weights);
    release_stage(values_stage);
  }

  // The KV tiles of a segment, if the peer computes the softmax: scores are sent one KV tile
  // before the weights are awaited.
  __device__ __forceinline__ void attend_without_softmax(Rows& rows, const Segment& segment,
                                                         Position& next, Position& at,
                                                         uint32_t& phase) const {
    Scores scores;
    Weights weights;
    int values_stage = -1;
    multiply_keys(scores, next);
    next.advance();
    wait<0>(rows, scores, weights);
    send_scores(scores, phase);
    for (int tile = segment.begin; tile < segment.end; ++tile) {
      const bool has_next = tile + 1 < segment.end;
      float rescale[2];
      if (has_next) {
        multiply_keys(scores, next);
        next.advance();
      }
      wait<1>(rows, scores, weights);
      if (has_next) release_stage(values_stage);
      wait<0>(rows, scores, weights);
      if (has_next) {
        send_scores(scores, phase ^ 1);
      } else {
        release_stage(values_stage);
      }
      take_weights(weights, rows.softmax, rescale, phase);
      const int remaining = segment.sequence.num_tokens - tile * BLOCK_N;
      add_values(rows, weights, rescale, remaining, at.stage);
      values_stage = at.stage;
      at.advance();
      phase ^= 1;
    }
    wait<0>(rows, scores, weights);
    release_stage(values_stage);
  }

  __device__ __forceinline__ void run() const {
    Position next, at;
    ConsumerSync sync_consumers = {.barrier = shared.consumers};
    uint32_t phase = 0;
    for (int segment_idx = 0;; ++segment_idx) {
      shared.queries_full.wait(segment_idx & 1);
      const Segment& segment = shared.segments[segment_idx & 1];
      if (segment.begin == segment.end) break;
      Rows rows;
      rows.begin(segment, warpgroup * Tile::kWarpgroupRows + Result::row(), args.heads);
      if constexpr (kSoftmax) {
        attend_with_softmax(rows, segment, next, at, phase);
      } else {
        attend_without_softmax(rows, segment, next, at, phase);
      }
      shared.queries_empty.arrive();
      rows.softmax.reduce_row_sums();
      RowStats<2> stats;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        stats.row_max[i] = rows.softmax.row_max[i], stats.row_sum[i] = rows.softmax.row_sum[i];
      }
      result.finish(rows.accumulators, stats, segment, sync_consumers);
    }
  }
};

// The last thread block merges up to max_inline_parts partial results of a row; flashmla_combine
// merges more.
template <typename T, typename Cached, int kPageSize, int kWarpgroups,
          typename Tile = PairTile<T, Cached, kPageSize, kWarpgroups>>
__global__ void __launch_bounds__(Tile::kNumThreads, 1)
    flashmla_pair(const __grid_constant__ TensorMap map_q,       // (tokens * heads, 576)
                  const __grid_constant__ TensorMap map_kv,      // (slots, a row)
                  const __grid_constant__ TensorMap map_rope,    // the same, of packed rows
                  const __grid_constant__ TensorMap map_scales,  // the same
                  const T* q,                                    // (tokens, heads, 576)
                  const Cached* kv_cache,  // (pages, page_size, 576), or PackedRows
                  const int* block_table,  // (batch, table_width)
                  const int* kv_lens,      // (batch,)
                  const int* cu_q,         // (batch + 1,)
                  T* out,                  // (tokens, heads, 512)
                  float* lse,              // (tokens, heads)
                  float* partials,         // PartialResults::slots
                  uint32_t* counters,  // (teams, thread blocks of a team), zero before and after
                  CombineTask* tasks,  // (teams,)
                  int batch, int heads, int table_width, float sm_scale, int num_slots,
                  int min_tiles, int max_inline_parts) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;  // to a swizzle atom
  auto& shared = *reinterpret_cast<PairShared<Tile>*>(dynamic_shared + padding);
  if (threadIdx.x == 0) {
    prefetch_map(map_q);
    prefetch_map(map_kv);
    constexpr int kWarps = kWarpgroupThreads / kWarpThreads;  // of a warpgroup
    shared.queries_full.init(1);
    shared.queries_empty.init(Tile::kConsumerThreads);
    shared.consumers.init(Tile::kConsumerThreads);
    for (int stage = 0; stage < Tile::kNumStages; ++stage) {
      shared.keys_full[stage].init(Tile::kPacked ? kWarpgroupThreads : 1);
      if constexpr (Tile::kPacked) shared.packed_full[stage].init(1);
      shared.keys_empty[stage].init(kWarpgroups * kWarps);
    }
    shared.scores_full.init(1);
    shared.weights_full.init(1);
    shared.scores_empty.init(kWarps);
    shared.weights_empty.init(kWarps);
    fence_barrier_init();
  }
  cluster_arrive_relaxed();
  cluster_wait();
  const typename Tile::List list = {
      .kv_lens = kv_lens, .cu_q = cu_q, .batch = batch, .heads = heads};
  list.prefetch(block_table, table_width);
  grid_dependency_wait();
  launch_dependents();

  const int team = blockIdx.x / Tile::kTeamBlocks, rank = blockIdx.x % Tile::kTeamBlocks;
  WorkCursor<typename Tile::List> first;
  const WorkPartition partition =
      shared.planner.partition(list, gridDim.x / Tile::kTeamBlocks, min_tiles, team, first);
  if (rank == 0 && threadIdx.x == 0) tasks[team].num_parts = 0;
  if (team < partition.num_teams) {
    const int warpgroup = warp_index() / 4;
    const LatentArgs<T, Cached> args = {.q = q,
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
      const PairProducer<Tile> producer = {.shared = shared,
                                           .map_q = map_q,
                                           .map_kv = map_kv,
                                           .block_table = block_table,
                                           .heads = heads,
                                           .table_width = table_width,
                                           .num_slots = num_slots,
                                           .rank = rank};
      // Both thread blocks have all rows.
      const LatentSchedule<Tile> schedule = {
          .list = list, .partition = partition, .team = team, .rank = 0};
      if constexpr (Tile::kPacked) {
        PairUnpacker<Tile>{producer, map_rope, map_scales}.run(schedule, first);
      } else if (warp_index() % 4 == 0) {
        producer.run(schedule, first);
      }
    } else if (warpgroup < kWarpgroups) {
      increase_registers<Tile::kConsumerRegisters>();
      const LatentResult<Tile> result = {results, rank, warpgroup * Tile::kWarpgroupRows};
      if (warpgroup == rank) {
        PairConsumer<Tile, true>{shared, args, result, warpgroup, 1 - rank}.run();
      } else {
        PairConsumer<Tile, false>{shared, args, result, warpgroup, 1 - rank}.run();
      }
    }
  }
  // A thread block must not exit while its peer may still send to it.
  cluster_sync();
}

}  // namespace kernelcat
