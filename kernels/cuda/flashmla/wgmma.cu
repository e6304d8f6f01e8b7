// Latent attention on Hopper: 64 rows a block, keys by TMA, products by wgmma.
//
// The result is 64 x 512 floats: each of two warpgroups sums half of the columns, over all tokens.
// Tiles of tokens take turns with two stages, and the warpgroups with the tiles: one has the scores
// of tile t, makes weights of them relative to the largest score so far, and tells the other one
// both. So while one works on its softmax, the tensor cores multiply the other's scores, and the
// weights of the tile before by values (DeepSeek's "seesaw" scheduling). A stage is given back in
// three parts, as soon as each has been read, and its next scores begin with the first that land.
#include <kernelcat/cluster.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/pdl.cuh>

#include "latent_gatherer.cuh"
#include "latent_products.cuh"
#include "latent_result.cuh"

namespace kernelcat {

// Runs in consumer warpgroup kOwn, which has half kOwn of the columns, and the scores of every
// second tile.
template <typename Tile, int kOwn>
struct LatentConsumer {
  using T = typename Tile::T;
  static constexpr int BLOCK_N = Tile::BLOCK_N, kOther = 1 - kOwn;
  static constexpr int kChunkBytes = Tile::kChunkBytes;
  using Result = LatentResult<Tile>;
  using Sums = LatentRows<T, BLOCK_N>;
  using Scores = typename Sums::Scores;
  using Weights = typename Sums::Weights;
  static constexpr int kSteps = Sums::kSteps;

  // softmax.row_max: of all tiles so far; softmax.row_sum: of the warpgroup's own.
  struct Rows : Sums {
    uint32_t rope[kSteps][4];  // of the queries
  };

  LatentShared<Tile>& shared;
  const LatentAttention<T, T>& call;
  Result result;

  // Where the lane's row of two by two matrices lies, of 16 columns of a chunk.
  static __device__ __forceinline__ uint32_t matrices(const uint8_t* chunk, int step) {
    const int lane = lane_index(), row = warp_index() % 4 * 16 + lane % 16;
    return shared_address(chunk) + row * kRowBytes + ((2 * step + lane / 16) ^ row % 8) * 16;
  }

  static __device__ __forceinline__ void release_stage(Barrier& empty) {
    if constexpr (Tile::kClusterSize == 1) {
      if (lane_index() == 0) empty.arrive();
    } else {
      if (lane_index() < Tile::kClusterSize) arrive_remote(empty, lane_index());
    }
  }

  // Starts scores = queries @ keys^T, chunk by chunk as keys land.
  __device__ __forceinline__ void multiply_keys(Rows& rows, Scores& scores, uint32_t phase) const {
    const uint64_t a = opaque(swizzled_rows_descriptor(shared_address(shared.queries[0])));
    const uint64_t b = opaque(swizzled_rows_descriptor(shared_address(shared.keys[kOwn][0])));
    Barrier* full = shared.keys_full[kOwn];
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
          const int at = Tile::chunk(kOwn, piece, i) * kChunkBytes + k * kWgmmaK * 2;
          Wgmma<T, BLOCK_N>::multiply(scores, advanced(a, at), advanced(b, at), true);
        }
      }
    }
    wgmma_commit();
    pin(scores);
  }

  // Starts rows.out += weights @ this half of the values in a stage.
  __device__ __forceinline__ void multiply_values(Rows& rows, Weights& weights, int stage) const {
    rows.multiply_values(weights, shared.keys[stage][kOwn * Tile::kHalfChunks]);
  }

  // Starts rows.out += the other warpgroup's weights @ values, once it has told them; `phase` of
  // those before.
  __device__ __forceinline__ void multiply_others(Rows& rows, Weights& weights,
                                                  uint32_t phase) const {
    shared.weights_full[kOther].wait(phase);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      load_matrices(weights[k], matrices(shared.weights[kOther], k));
    }
    float kept[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float most = shared.most[kOther][Result::row() + 8 * i];
      kept[i] = rescale_factor(rows.softmax.row_max[i], most);
      rows.softmax.row_max[i] = most;
      rows.softmax.row_sum[i] *= kept[i];
    }
    rows.rescale_sums(kept);
    multiply_values(rows, weights, kOther);
  }

  // The warpgroup's own tile. The first warpgroup takes the other's weights after its own (run()),
  // the second one while it works on its softmax: so both stages are given back as early as can be,
  // and no values wait for the next keys. `index` is the segment's, modulo 2; `phase` of the keys,
  // `others_phase` of the other's weights before.
  __device__ __forceinline__ void attend(Rows& rows, const Segment& segment, uint32_t index,
                                         int tile, uint32_t phase, uint32_t others_phase) const {
    Scores scores;
    Weights others, weights;
    // A segment's first scores are not multiplied side by side with its second ones: then the
    // warpgroups would wait for their softmax together, and the tensor cores for both.
    if (kOwn == 1 && tile == segment.begin + 1) shared.first_scores.wait(index);
    multiply_keys(rows, scores, phase);
    if constexpr (kOwn == 1) multiply_others(rows, others, others_phase);
    wgmma_wait<kOwn>();
    pin(scores);
    pin(rows.rope);
    if (kOwn == 0 && tile == segment.begin) shared.first_scores.arrive();
    release_stage(shared.rope_empty[kOwn]);
    if (tile + 2 >= segment.end) shared.queries_empty.arrive();
    const int token = tile * BLOCK_N, left = segment.sequence.num_tokens - token;
    if (left > 0 && left < BLOCK_N) {
      clear_tokens<BLOCK_N>(shared.keys[kOwn][0], Tile::kValueChunks, left, kOwn);
    }
    float kept[2];
    rows.exponentiate(scores, token, call.sm_scale * kLog2E, kept);
    Rows::round(scores, weights);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      store_matrices(matrices(shared.weights[kOwn], k), weights[k]);
    }
    if (lane_index() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        shared.most[kOwn][Result::row() + 8 * i] = rows.softmax.row_max[i];
    }
    shared.weights_full[kOwn].arrive();
    if constexpr (kOwn == 1) {
      wgmma_wait<0>();
      pin(rows.out);
      pin(others);
      release_stage(shared.half_empty[kOther][kOwn]);
    }
    rows.rescale_sums(kept);
    multiply_values(rows, weights, kOwn);
    wgmma_wait<0>();
    pin(rows.out);
    pin(weights);
    release_stage(shared.half_empty[kOwn][kOwn]);
  }

  // The other warpgroup's tile, once it has told the weights.
  __device__ __forceinline__ void attend_others(Rows& rows, uint32_t phase) const {
    Weights others;
    multiply_others(rows, others, phase);
    wgmma_wait<0>();
    pin(rows.out);
    pin(others);
    release_stage(shared.half_empty[kOther][kOwn]);
  }

  // The softmax's denominators of all tokens, from both warpgroups' tiles.
  __device__ __forceinline__ RowSums<2> sums_of(Rows& rows, Meeting& meet) const {
    rows.softmax.reduce_row_sums();
    if (lane_index() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        shared.totals[kOwn][Result::row() + 8 * i] = rows.softmax.row_sum[i];
    }
    meet();
    RowSums<2> sums;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums.most[i] = rows.softmax.row_max[i];
      sums.total[i] =
          shared.totals[0][Result::row() + 8 * i] + shared.totals[1][Result::row() + 8 * i];
    }
    return sums;
  }

  __device__ __forceinline__ void run() const {
    Meeting meet = {shared.meeting};
    uint32_t phases = 0;  // bit 0: of the stage; bit 1: of segments; bit 2: of others' weights
    while (true) {
      const uint32_t index = phases >> 1 & 1;
      shared.queries_full.wait(index);
      const Segment& segment = shared.segments[index];
      if (segment.begin == segment.end) break;
      Rows rows;
      rows.begin(segment, Result::row(), call.heads);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices(rows.rope[k], matrices(shared.weights[0], k));
      }
      // Before weights take the place of the queries' rotated part.
      meet();
      if (segment.begin + kOwn >= segment.end) shared.queries_empty.arrive();  // no tile of its own
      for (int tile = segment.begin + kOwn; tile < segment.end; tile += 2) {
        attend(rows, segment, index, tile, phases & 1, phases >> 2);
        phases ^= kOwn == 1 ? 5 : 1;
        if (kOwn == 0 && tile + 1 < segment.end) {
          attend_others(rows, phases >> 2);
          phases ^= 4;
        }
      }
      if (kOwn == 1 && (segment.end - segment.begin) % 2 == 1) {
        attend_others(rows, phases >> 2);
        phases ^= 4;
      }
      fence_async_shared();  // TMA writes where weights were
      shared.queries_rope_empty.arrive();
      result.finish(rows.out, sums_of(rows, meet), segment, meet);
      phases ^= 2;
    }
  }
};

// Up to `few` blocks' parts of a row are put together here; flashmla_combine does the rest.
template <typename T, int kPageSize, int kRowTiles, int kClusterSize,
          typename Tile = LatentTile<T, kPageSize, kRowTiles, kClusterSize>>
__global__ void __launch_bounds__(Tile::kNumThreads, 1)
    flashmla_wgmma(const __grid_constant__ TensorMap map_q,   // (tokens * heads, 576)
                   const __grid_constant__ TensorMap map_kv,  // (slots, 576)
                   const T* q, const T* kv_cache, const int* block_table, const int* kv_lens,
                   const int* cu_q, T* out, float* lse, float* memory, uint32_t* counters,
                   Task* tasks, int batch, int heads, int table_width, float sm_scale,
                   int num_slots, int least, int few) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
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
    shared.meeting.init(Tile::kConsumerThreads);
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
  const typename Tile::List list = {kv_lens, cu_q, batch, heads};
  list.prefetch(block_table, table_width);
  grid_dependency_wait();
  launch_dependents();

  const int share = blockIdx.x / kRowTiles, rank = blockIdx.x % kRowTiles;
  Cursor<typename Tile::List> first;
  const Shares shares = shared.planner.deal(list, gridDim.x / kRowTiles, least, share, first);
  if (rank == 0 && threadIdx.x == 0) tasks[share].num_parts = 0;
  if (share < shares.num_blocks) {
    const int warpgroup = warp_index() / 4;
    const LatentAttention<T, T> call = {q,   kv_cache, block_table, kv_lens,     cu_q,    out,
                                        lse, batch,    heads,       table_width, sm_scale};
    const LatentResults<Tile> results = {call, {memory}, counters, tasks, &shared.is_last,
                                         few,  share,    rank};
    if (warpgroup == 2) {
      decrease_registers<Tile::kProducerRegisters>();
      const LatentProducer<Tile> producer = {shared, map_q,       map_kv,    block_table,
                                             heads,  table_width, num_slots, rank};
      const LatentSchedule<Tile> schedule = {list, shares, share, rank};
      if constexpr (Tile::kGathers) {
        LatentGatherer<Tile>{producer, kv_cache}.run(schedule, first);
      } else if (warp_index() % 4 == 0) {
        producer.run(schedule, first);
      }
    } else {
      increase_registers<Tile::kConsumerRegisters>();
      if (warpgroup == 0) {
        LatentConsumer<Tile, 0>{shared, call, {results, 0, 0}}.run();
      } else {
        LatentConsumer<Tile, 1>{shared, call, {results, 1, 0}}.run();
      }
    }
  }
  // A block must stay while its peer may give stages back to it.
  if constexpr (kClusterSize > 1) cluster_sync();
}

}  // namespace kernelcat
