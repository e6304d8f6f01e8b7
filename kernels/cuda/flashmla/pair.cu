// Latent attention of 64 or 128 rows on Hopper by two blocks, of which each has half of the
// columns.
//
// Both blocks of a cluster have all rows, and of a tile of tokens the 256 latent columns that
// their half of the result is of: a byte of the cache is read by one SM alone, and takes the room
// of half a tile. Scores need all columns. So a block has the softmax of 64 of the rows: the other
// one sends what its columns add to their scores, and gets their weights; both go from the
// registers of a thread to those of the same thread there, through distributed shared memory. The
// warpgroup of a block's own rows multiplies the next keys while it works on its softmax, the other
// one sends its scores a tile ahead, so that nobody waits for the way there and back.
#include <kernelcat/cluster.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/remote_store.cuh>

#include "latent_products.cuh"
#include "latent_result.cuh"
#include "pair_unpacker.cuh"

namespace kernelcat {

// Runs in a consumer warpgroup: kOwn if its rows are the block's own.
template <typename Tile, bool kOwn>
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
  const LatentAttention<T, typename Tile::Cached>& call;
  Result result;
  int warpgroup, peer;

  static __device__ __forceinline__ int thread() { return threadIdx.x % kWarpgroupThreads; }

  // Starts scores = queries @ keys^T by the block's columns; those of the rotated part count where
  // the softmax is.
  __device__ __forceinline__ void multiply_keys(Scores& scores, const Position& at) const {
    shared.keys_full[at.stage].wait(at.phase);
    const uint8_t* rows = shared.queries[warpgroup][0];
    const uint64_t a = opaque(swizzled_rows_descriptor(shared_address(rows)));
    const uint64_t b = opaque(swizzled_rows_descriptor(shared_address(shared.keys[at.stage][0])));
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kValueChunks * kSteps; ++step) {
      const int place = step / kSteps * kChunkBytes + step % kSteps * kWgmmaK * 2;
      Wgmma<T, BLOCK_N>::multiply(scores, advanced(a, place), advanced(b, place), step > 0);
    }
    if constexpr (kOwn) {
      const uint64_t rope = opaque(swizzled_rows_descriptor(shared_address(shared.queries_rope)));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int place = step * kWgmmaK * 2;
        Wgmma<T, BLOCK_N>::multiply(scores, advanced(rope, place),
                                    advanced(b, Tile::kRopeChunk * kChunkBytes + place), true);
      }
    }
    wgmma_commit();
    pin(scores);
  }

  // Says that what the other block sent has been read. Loads may still be under way.
  __device__ __forceinline__ void release_stage_remote(Barrier& empty) const {
    fence_async_shared();
    __syncwarp();
    if (lane_index() == 0) arrive_remote(empty, peer);
  }

  // Waits until what was sent is here: `phase` of earlier tiles.
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
    const float4 sums = {softmax.row_max[0], softmax.row_max[1], softmax.row_sum[0],
                         softmax.row_sum[1]};
    store_remote(&shared.sums[thread()], sums, shared.weights_full, peer);
  }

  __device__ __forceinline__ void take_weights(Weights& weights, RunningSoftmax& softmax,
                                               float (&kept)[2], uint32_t phase) const {
    receive(shared.weights_full, sizeof(shared.weights) + sizeof(shared.sums), phase);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 words = shared.weights[k][thread()];
      weights[k][0] = words.x, weights[k][1] = words.y;
      weights[k][2] = words.z, weights[k][3] = words.w;
    }
    const float4 sums = shared.sums[thread()];
    release_stage_remote(shared.weights_empty);
    kept[0] = rescale_factor(softmax.row_max[0], sums.x),
    kept[1] = rescale_factor(softmax.row_max[1], sums.y);
    softmax.row_max[0] = sums.x, softmax.row_max[1] = sums.y;
    softmax.row_sum[0] = sums.z, softmax.row_sum[1] = sums.w;
  }

  // Starts the sums of a tile's values, of which the sequence has `left` tokens.
  __device__ __forceinline__ void add_values(Rows& rows, Weights& weights, const float (&kept)[2],
                                             int left, int stage) const {
    uint8_t* values = shared.keys[stage][0];
    if (left > 0 && left < BLOCK_N) {
      clear_tokens<BLOCK_N>(values, Tile::kValueChunks, left, warpgroup);
    }
    rows.rescale_sums(kept);
    rows.multiply_values(weights, values);
  }

  // Waits for all products but the last kPending. (Where it stands under a condition, ptxas takes
  // accumulators for read while they are written, and waits for every product by itself.)
  template <int kPending>
  static __device__ __forceinline__ void wait(Rows& rows, Scores& scores, Weights& weights) {
    wgmma_wait<kPending>();
    pin(rows.out);
    pin(scores);
    pin(weights);
  }

  // Gives the keys back whose values have been multiplied; none if `stage` is negative.
  __device__ __forceinline__ void release_stage(int stage) const {
    if (stage >= 0 && lane_index() == 0) shared.keys_empty[stage].arrive();
  }

  // Tiles of a segment, of the block's own rows: the next tile's scores and this one's values are
  // multiplied one after the other, the values while the next softmax is worked on. `next`, `at`:
  // where the ring is with keys, and with values; `phase` flips with every tile.
  __device__ __forceinline__ void attend_own(Rows& rows, const Segment& segment, Position& next,
                                             Position& at, uint32_t& phase) const {
    Scores scores;
    Weights weights;
    int before = -1;  // the stage whose values are under way
    multiply_keys(scores, next);
    next.advance();
    wait<0>(rows, scores, weights);
    for (int tile = segment.begin; tile < segment.end; ++tile) {
      const int token = tile * BLOCK_N;
      float kept[2];
      take_scores(scores, phase);
      rows.exponentiate(scores, token, call.sm_scale * kLog2E, kept);
      wait<0>(rows, scores, weights);
      release_stage(before);
      Rows::round(scores, weights);
      send_weights(weights, rows.softmax, phase);
      if (tile + 1 < segment.end) {
        multiply_keys(scores, next);
        next.advance();
      }
      add_values(rows, weights, kept, segment.sequence.num_tokens - token, at.stage);
      wait<1>(rows, scores, weights);
      before = at.stage;
      at.advance();
      phase ^= 1;
    }
    wait<0>(rows, scores, weights);
    release_stage(before);
  }

  // Of the other block's rows: scores are sent a tile ahead of the weights that are awaited.
  __device__ __forceinline__ void attend_others(Rows& rows, const Segment& segment, Position& next,
                                                Position& at, uint32_t& phase) const {
    Scores scores;
    Weights weights;
    int before = -1;
    multiply_keys(scores, next);
    next.advance();
    wait<0>(rows, scores, weights);
    send_scores(scores, phase);
    for (int tile = segment.begin; tile < segment.end; ++tile) {
      const bool has_next = tile + 1 < segment.end;
      float kept[2];
      if (has_next) {
        multiply_keys(scores, next);
        next.advance();
      }
      wait<1>(rows, scores, weights);
      if (has_next) release_stage(before);
      wait<0>(rows, scores, weights);
      if (has_next) {
        send_scores(scores, phase ^ 1);
      } else {
        release_stage(before);
      }
      take_weights(weights, rows.softmax, kept, phase);
      const int left = segment.sequence.num_tokens - tile * BLOCK_N;
      add_values(rows, weights, kept, left, at.stage);
      before = at.stage;
      at.advance();
      phase ^= 1;
    }
    wait<0>(rows, scores, weights);
    release_stage(before);
  }

  __device__ __forceinline__ void run() const {
    Position next, at;
    Meeting meet = {shared.meeting};
    uint32_t phase = 0;
    for (int index = 0;; ++index) {
      shared.queries_full.wait(index & 1);
      const Segment& segment = shared.segments[index & 1];
      if (segment.begin == segment.end) break;
      Rows rows;
      rows.begin(segment, warpgroup * Tile::kWarpgroupRows + Result::row(), call.heads);
      if constexpr (kOwn) {
        attend_own(rows, segment, next, at, phase);
      } else {
        attend_others(rows, segment, next, at, phase);
      }
      shared.queries_empty.arrive();
      rows.softmax.reduce_row_sums();
      RowSums<2> sums;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums.most[i] = rows.softmax.row_max[i], sums.total[i] = rows.softmax.row_sum[i];
      }
      result.finish(rows.out, sums, segment, meet);
    }
  }
};

// Up to `few` clusters' parts of a row are put together here; flashmla_combine does the rest.
template <typename T, typename Cached, int kPageSize, int kWarpgroups,
          typename Tile = PairTile<T, Cached, kPageSize, kWarpgroups>>
__global__ void __launch_bounds__(Tile::kNumThreads, 1)
    flashmla_pair(const __grid_constant__ TensorMap map_q,       // (tokens * heads, 576)
                  const __grid_constant__ TensorMap map_kv,      // (slots, a row)
                  const __grid_constant__ TensorMap map_rope,    // the same, of packed rows
                  const __grid_constant__ TensorMap map_scales,  // the same
                  const T* q, const Cached* kv_cache, const int* block_table, const int* kv_lens,
                  const int* cu_q, T* out, float* lse, float* memory, uint32_t* counters,
                  Task* tasks, int batch, int heads, int table_width, float sm_scale, int num_slots,
                  int least, int few) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<PairShared<Tile>*>(dynamic_shared + padding);
  if (threadIdx.x == 0) {
    prefetch_map(map_q);
    prefetch_map(map_kv);
    constexpr int kWarps = kWarpgroupThreads / kWarpThreads;  // of a warpgroup
    shared.queries_full.init(1);
    shared.queries_empty.init(Tile::kConsumerThreads);
    shared.meeting.init(Tile::kConsumerThreads);
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
  const typename Tile::List list = {kv_lens, cu_q, batch, heads};
  list.prefetch(block_table, table_width);
  grid_dependency_wait();
  launch_dependents();

  const int share = blockIdx.x / Tile::kSide, rank = blockIdx.x % Tile::kSide;
  Cursor<typename Tile::List> first;
  const Shares shares = shared.planner.deal(list, gridDim.x / Tile::kSide, least, share, first);
  if (rank == 0 && threadIdx.x == 0) tasks[share].num_parts = 0;
  if (share < shares.num_blocks) {
    const int warpgroup = warp_index() / 4;
    const LatentAttention<T, Cached> call = {q,   kv_cache, block_table, kv_lens,     cu_q,    out,
                                             lse, batch,    heads,       table_width, sm_scale};
    const LatentResults<Tile> results = {call, {memory}, counters, tasks, &shared.is_last,
                                         few,  share,    rank};
    if (warpgroup == 2) {
      decrease_registers<Tile::kProducerRegisters>();
      const PairProducer<Tile> producer = {shared, map_q,       map_kv,    block_table,
                                           heads,  table_width, num_slots, rank};
      // Both blocks have all rows.
      const LatentSchedule<Tile> schedule = {list, shares, share, 0};
      if constexpr (Tile::kPacked) {
        PairUnpacker<Tile>{producer, map_rope, map_scales}.run(schedule, first);
      } else if (warp_index() % 4 == 0) {
        producer.run(schedule, first);
      }
    } else if (warpgroup < kWarpgroups) {
      increase_registers<Tile::kConsumerRegisters>();
      const LatentResult<Tile> result = {results, rank, warpgroup * Tile::kWarpgroupRows};
      if (warpgroup == rank) {
        PairConsumer<Tile, true>{shared, call, result, warpgroup, 1 - rank}.run();
      } else {
        PairConsumer<Tile, false>{shared, call, result, warpgroup, 1 - rank}.run();
      }
    }
  }
  // A block must stay while its peer may send to it.
  cluster_sync();
}

}  // namespace kernelcat
