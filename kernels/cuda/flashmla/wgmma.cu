// Latent attention on Hopper: 64 rows a block, keys by TMA, products by wgmma.
//
// The result is 64 x 512 floats: each of two warpgroups sums half of the columns, over all tokens.
// Tiles of tokens take turns with two stages, and the warpgroups with the tiles: one has the scores
// of tile t, makes weights of them relative to the largest score so far, and tells the other one
// both. So while one works on its softmax, the tensor cores multiply the other's scores, and the
// weights of the tile before by values (DeepSeek's "seesaw" scheduling). A stage is given back in
// three parts, as soon as each has been read, and its next scores begin with the first that land.
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/cluster.cuh>
#include <kernelcat/fragments.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/pdl.cuh>

#include "../paged_attn/running_softmax.cuh"
#include "latent_tile.cuh"
#include "partials.cuh"
#include "wgmma_queries.cuh"

namespace kernelcat {

// Barrier 0 is __syncthreads'.
constexpr int kWeightsBarrier = 1;  // and one for the other warpgroup's
constexpr int kConsumersBarrier = 3;
constexpr int kOwnBarrier = 4;  // and one for the other warpgroup

__device__ __forceinline__ void named_barrier_arrive(int barrier, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

template <int kCount, int kWords>
__device__ __forceinline__ void pin(uint32_t (&values)[kCount][kWords]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) asm volatile("" : "+r"(values[i][j])::"memory");
  }
}

// Keeps the compiler from holding all that follows from a descriptor in registers.
__device__ __forceinline__ uint64_t opaque(uint64_t descriptor) {
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}

// Runs in one warp.
template <typename Tile>
struct LatentProducer {
  LatentShared<Tile>& shared;
  const TensorMap &map_q, &map_kv;
  const int* block_table;
  int heads, table_width, num_slots, rank;

  // Where in the cache the lane's box of a tile begins: beyond its end, which makes zeros, where
  // the sequence has no tokens.
  __device__ __forceinline__ int slot_of(const Segment& segment, int tile) const {
    const int box = (Tile::kClusterSize > 1 ? rank * Tile::kBoxes : 0) + lane_index();
    const int token = tile * Tile::BLOCK_N + box * Tile::kBoxTokens;
    if (lane_index() >= Tile::kBoxes || token >= segment.sequence.num_tokens) return num_slots;
    const int64_t entry =
        static_cast<int64_t>(segment.index) * table_width + token / Tile::kPageSize;
    return __ldg(block_table + entry) * Tile::kPageSize + token % Tile::kPageSize;
  }

  // The consumers' next segment, number `index`, and its queries.
  __device__ __forceinline__ void tell(const Segment& segment, int index) const {
    shared.queries_empty.wait(index & 1 ^ 1);
    if (lane_index() == 0) {
      shared.segments[index & 1] = segment;
      const int row = segment.sequence.first_query * heads + segment.first_row;
      shared.queries_full.arrive_expect(Tile::kChunks * Tile::kChunkBytes);
      tensor_load(shared.weights[0], map_q, kLatent, row, shared.queries_full, kDefaultPolicy);
      for (int chunk = 0; chunk < Tile::kValueChunks; ++chunk) {
        tensor_load(shared.queries[chunk], map_q, chunk * Tile::kColumns, row, shared.queries_full,
                    kDefaultPolicy);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_piece(int stage, int piece, int slot) const {
    const uint64_t policy = evict_first_policy();
    const int lane = lane_index(), chunks = piece == 0 ? 1 : Tile::kPieceChunks;
    Barrier& full = shared.keys_full[stage][piece];
    if (lane == 0) full.arrive_expect(chunks * Tile::kChunkBytes);
    __syncwarp();
    if (lane >= Tile::kBoxes) return;
    for (int i = 0; i < chunks; ++i) {
      const int chunk = piece == 0 ? Tile::kValueChunks : Tile::chunk(stage, piece, i);
      const int box = (Tile::kClusterSize > 1 ? rank * Tile::kBoxes : 0) + lane;
      uint8_t* place = shared.keys[stage][chunk] + box * Tile::kBoxTokens * kRowBytes;
      if constexpr (Tile::kClusterSize == 1) {
        tensor_load(place, map_kv, chunk * Tile::kColumns, slot, full, policy);
      } else {
        tensor_load_multicast(place, map_kv, chunk * Tile::kColumns, slot, full,
                              (1 << Tile::kClusterSize) - 1, policy);
      }
    }
  }

  // `parity` of the stage's earlier loads.
  __device__ __forceinline__ void load_keys(int stage, uint32_t parity, int slot) const {
    shared.rope_empty[stage].wait(parity ^ 1);
    load_piece(stage, 0, slot);
#pragma unroll 1
    for (int piece = 1; piece < Tile::kPieces; ++piece) {
      // A stage's own half first, which is given back first.
      const int half = (piece - 1) * Tile::kPieceChunks / Tile::kHalfChunks ^ stage;
      shared.half_empty[stage][half].wait(parity ^ 1);
      load_piece(stage, piece, slot);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void tell_end(int index) const {
    shared.queries_empty.wait(index & 1 ^ 1);
    if (lane_index() == 0) {
      Segment& none = shared.segments[index & 1];
      none.begin = none.end = 0;
      shared.queries_full.arrive();
    }
  }

  __device__ __forceinline__ void run(const LatentSchedule<Tile>& schedule,
                                      const Cursor<typename Tile::List>& cursor) const {
    int index = 0;          // of the segment
    uint32_t parities = 0;  // bit s: of stage s
    schedule.for_each(cursor, [&](const Segment& segment) {
      int slot = slot_of(segment, segment.begin);
      for (int tile = segment.begin; tile < segment.end; ++tile) {
        const int stage = (tile - segment.begin) % 2;
        const int next = tile + 1 < segment.end ? slot_of(segment, tile + 1) : num_slots;
        load_keys(stage, parities >> stage & 1, slot);
        parities ^= 1 << stage;
        if (tile == segment.begin) tell(segment, index++);
        slot = next;
      }
    });
    tell_end(index);
  }
};

// Runs in consumer warpgroup kOwn, which has half kOwn of the columns, and the scores of every
// second tile.
template <typename Tile, int kOwn>
struct LatentConsumer {
  using T = typename Tile::T;
  static constexpr int BLOCK_N = Tile::BLOCK_N, kOther = 1 - kOwn;
  static constexpr int kSteps = BLOCK_N / kWgmmaK;
  static constexpr int kChunkBytes = Tile::kChunkBytes;
  static constexpr int kHalf = kLatent / 2, kTileRows = Tile::BLOCK_M * Tile::kRowTiles;
  using Scores = float[BLOCK_N / 2];

  struct Rows {
    float out[kHalf / 2];
    uint32_t rope[kSteps][4];  // of the queries
    RunningSoftmax softmax;    // most: of all tiles so far; total: of the warpgroup's own
    int limit[2];              // the last tokens that the lane's two rows see
    int clear_end;             // tokens before this one are seen by all
  };

  LatentShared<Tile>& shared;
  const LatentAttention<T, T>& call;
  const Partials<kTileRows>& partials;
  uint32_t* counters;  // (shares, kRowTiles): zero before and after
  Task* tasks;         // (shares,)
  int few, share, rank;

  // The upper one of the lane's two rows.
  static __device__ __forceinline__ int row() { return warp_index() % 4 * 16 + lane_index() / 4; }
  // Where the lane's row of two by two matrices lies, of 16 columns of a chunk.
  static __device__ __forceinline__ uint32_t matrices(const uint8_t* chunk, int step) {
    const int lane = lane_index(), row = warp_index() % 4 * 16 + lane % 16;
    return shared_address(chunk) + row * kRowBytes + ((2 * step + lane / 16) ^ row % 8) * 16;
  }

  static __device__ __forceinline__ void give_back(Barrier& empty) {
    if constexpr (Tile::kClusterSize == 1) {
      if (lane_index() == 0) empty.arrive();
    } else {
      if (lane_index() < Tile::kClusterSize) arrive_remote(empty, lane_index());
    }
  }

  // Once the largest scores have been seen, most tiles change nothing.
  static __device__ __forceinline__ void rescale_sums(Rows& rows, const float (&kept)[2]) {
    if (!__any_sync(0xffffffff, kept[0] != 1.0f || kept[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) rows.out[i] *= kept[i / 2 % 2];
  }

  // Starts scores = queries @ keys^T, chunk by chunk as keys land.
  __device__ __forceinline__ void multiply_keys(Rows& rows, Scores& scores, uint32_t parity) const {
    const uint64_t a = opaque(swizzled_rows_descriptor(shared_address(shared.queries[0])));
    const uint64_t b = opaque(swizzled_rows_descriptor(shared_address(shared.keys[kOwn][0])));
    Barrier* full = shared.keys_full[kOwn];
    full[0].wait(parity);
    pin(scores);
    pin(rows.rope);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int at = Tile::kValueChunks * kChunkBytes + k * kWgmmaK * 2;
      WgmmaQueries<T>::multiply(scores, rows.rope[k], advanced(b, at), k > 0);
    }
#pragma unroll
    for (int piece = 1; piece < Tile::kPieces; ++piece) {
      full[piece].wait(parity);
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
  __device__ __forceinline__ void multiply_values(Rows& rows, uint32_t (&weights)[kSteps][4],
                                                  int stage) const {
    const uint8_t* half = shared.keys[stage][kOwn * Tile::kHalfChunks];
    const uint64_t b = opaque(swizzled_values_descriptor(shared_address(half), kChunkBytes));
    pin(rows.out);
    pin(weights);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      WgmmaValues<T, kHalf>::multiply(rows.out, weights[k], advanced(b, k * kWgmmaK * kRowBytes));
    }
    wgmma_commit();
    pin(rows.out);
  }

  // Starts rows.out += the other warpgroup's weights @ values, once it has told them.
  __device__ __forceinline__ void multiply_others(Rows& rows,
                                                  uint32_t (&weights)[kSteps][4]) const {
    named_barrier_sync(kWeightsBarrier + kOther, Tile::kConsumerThreads);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      load_matrices(weights[k], matrices(shared.weights[kOther], k));
    }
    float kept[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float most = shared.most[kOther][row() + 8 * i];
      kept[i] = rescale(rows.softmax.most[i], most);
      rows.softmax.most[i] = most;
      rows.softmax.total[i] *= kept[i];
    }
    rescale_sums(rows, kept);
    multiply_values(rows, weights, kOther);
  }

  // Slots that hold none of the sequence's tokens may hold NaN, which weights of zero do not undo.
  __device__ __forceinline__ void clear_from(int token) const {
    constexpr int kUnits = kRowBytes / 16;
    const int units = (BLOCK_N - token) * kUnits;
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::kValueChunks; ++chunk) {
      uint4* rows = reinterpret_cast<uint4*>(shared.keys[kOwn][chunk]) + token * kUnits;
      for (int i = threadIdx.x % kWarpgroupThreads; i < units; i += kWarpgroupThreads) rows[i] = {};
    }
    fence_async_shared();
    named_barrier_sync(kOwnBarrier + kOwn, kWarpgroupThreads);
  }

  static __device__ __forceinline__ void hide(const Rows& rows, Scores& scores, int token) {
    const int first = token + lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      if (first + i / 4 * 8 + i % 2 > rows.limit[i / 2 % 2]) scores[i] = -kInfinity;
    }
  }

  // The warpgroup's own tile. The first warpgroup takes the other's weights after its own (run()),
  // the second one while it works on its softmax: so both stages are given back as early as can be,
  // and no values wait for the next keys.
  __device__ __forceinline__ void attend(Rows& rows, const Segment& segment, int tile,
                                         uint32_t parity) const {
    Scores scores;
    uint32_t others[kSteps][4];
    multiply_keys(rows, scores, parity);
    if constexpr (kOwn == 1) multiply_others(rows, others);
    wgmma_wait<kOwn>();
    pin(scores);
    pin(rows.rope);
    give_back(shared.rope_empty[kOwn]);
    const int token = tile * BLOCK_N, left = segment.sequence.num_tokens - token;
    if (left > 0 && left < BLOCK_N) clear_from(left);
    if (token + BLOCK_N > rows.clear_end) hide(rows, scores, token);
    float kept[2];
    rows.softmax.add(reinterpret_cast<float (&)[BLOCK_N / 8][4]>(scores), call.sm_scale * kLog2E,
                     kept);
    uint32_t weights[kSteps][4];
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) {
      weights[i / 4][i % 4] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      store_matrices(matrices(shared.weights[kOwn], k), weights[k]);
    }
    if (lane_index() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) shared.most[kOwn][row() + 8 * i] = rows.softmax.most[i];
    }
    named_barrier_arrive(kWeightsBarrier + kOwn, Tile::kConsumerThreads);
    if constexpr (kOwn == 1) {
      wgmma_wait<0>();
      pin(rows.out);
      pin(others);
      give_back(shared.half_empty[kOther][kOwn]);
    }
    rescale_sums(rows, kept);
    multiply_values(rows, weights, kOwn);
    wgmma_wait<0>();
    pin(rows.out);
    pin(weights);
    give_back(shared.half_empty[kOwn][kOwn]);
  }

  // The other warpgroup's tile, once it has told the weights.
  __device__ __forceinline__ void attend_others(Rows& rows) const {
    uint32_t others[kSteps][4];
    multiply_others(rows, others);
    wgmma_wait<0>();
    pin(rows.out);
    pin(others);
    give_back(shared.half_empty[kOther][kOwn]);
  }

  // The softmax's denominators of all tokens, from both warpgroups' tiles.
  __device__ __forceinline__ RowSums<2> sums_of(Rows& rows) const {
    rows.softmax.end();
    if (lane_index() % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) shared.totals[kOwn][row() + 8 * i] = rows.softmax.total[i];
    }
    named_barrier_sync(kConsumersBarrier, Tile::kConsumerThreads);
    RowSums<2> sums;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums.most[i] = rows.softmax.most[i];
      sums.total[i] = shared.totals[0][row() + 8 * i] + shared.totals[1][row() + 8 * i];
    }
    return sums;
  }

  // Divides by the softmax's denominators and stores.
  __device__ __forceinline__ void store(const float (&out)[kHalf / 2], const RowSums<2>& sums,
                                        const Segment& segment) const {
    const int lane = lane_index();
    const int64_t first =
        static_cast<int64_t>(segment.sequence.first_query) * call.heads + segment.first_row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_live = row() + 8 * i < segment.num_rows;
      const int64_t place = first + row() + 8 * i;
      const RowEnd end = RowEnd::of(sums.most[i], sums.total[i]);
      if (kOwn == 0 && is_live && lane % 4 == 0) call.lse[place] = end.lse;
      T* target = call.out + place * kLatent + kOwn * kHalf + lane % 4 * 8;
#pragma unroll
      for (int column = 0; column < kHalf; column += 32) {
        uint32_t matrices[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = column / 2 + 4 * j + 2 * i;
          matrices[j] = pack<T>(out[at] * end.factor, out[at + 1] * end.factor);
        }
        const uint4 eight = gather_rows(matrices);
        if (is_live) *reinterpret_cast<uint4*>(target + column) = eight;
      }
    }
  }

  // Columns 0 and 1 of every eight of this lane's row `i`, in a slot.
  __device__ __forceinline__ float2* part(int slot, int i) const {
    const int first = kOwn * kHalf + lane_index() % 4 * 2;
    return reinterpret_cast<float2*>(
        partials.at(slot, rank * Tile::BLOCK_M + row() + 8 * i, first));
  }
  __device__ __forceinline__ float2* part_sums(int slot, int i) const {
    return partials.most_and_total(slot, rank * Tile::BLOCK_M + row() + 8 * i);
  }

  __device__ __forceinline__ void put(const float (&out)[kHalf / 2], const RowSums<2>& sums,
                                      int slot) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2* pairs = part(slot, i);
#pragma unroll
      for (int step = 0; step < kHalf / 8; ++step) {
        const int at = 4 * step + 2 * i;
        __stcg(pairs + 4 * step, {out[at], out[at + 1]});
      }
      if (kOwn == 0 && lane_index() % 4 == 0) {
        __stcg(part_sums(slot, i), {sums.most[i], sums.total[i]});
      }
    }
  }

  // Adds all parts up, in the order of shares.
  __device__ __forceinline__ void merge(const Segment& segment) const {
    constexpr int kInFlight = 16;
    float out[kHalf / 2] = {};
    RowSums<2> sums;
#pragma unroll 1
    for (int from = segment.first_share; from <= segment.last_share; ++from) {
      const int slot = Partials<kTileRows>::slot(from, from == segment.first_share);
      RowSums<2> other;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 row_sums = __ldcg(part_sums(slot, i));
        other.most[i] = row_sums.x, other.total[i] = row_sums.y;
      }
      const Factors<2> factors = add(sums, other);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2* pairs = part(slot, i);
#pragma unroll
        for (int first = 0; first < kHalf / 8; first += kInFlight) {
          float2 found[kInFlight];
#pragma unroll
          for (int j = 0; j < kInFlight; ++j) found[j] = __ldcg(pairs + 4 * (first + j));
#pragma unroll
          for (int j = 0; j < kInFlight; ++j) {
            float* pair = out + 4 * (first + j) + 2 * i;
            pair[0] = pair[0] * factors.own[i] + found[j].x * factors.other[i];
            pair[1] = pair[1] * factors.own[i] + found[j].y * factors.other[i];
          }
        }
      }
    }
    store(out, sums, segment);
  }

  // Stores the rows, or what this block has of them. Up to `few` parts are put together by the last
  // block that has any, more by a kernel that follows.
  __device__ __forceinline__ void finish(Rows& rows, const Segment& segment) const {
    const RowSums<2> sums = sums_of(rows);
    const int num_parts = segment.last_share - segment.first_share + 1;
    if (num_parts == 1) {
      store(rows.out, sums, segment);
      return;
    }
    const bool begins_here = segment.first_share == share;
    put(rows.out, sums, Partials<kTileRows>::slot(share, begins_here));
    if (num_parts > few) {
      if (begins_here && rank == 0 && threadIdx.x == 0) {
        const int first = segment.sequence.first_query * call.heads + segment.side_row;
        tasks[share] = {num_parts, first, segment.side_rows};
      }
      return;
    }
    uint32_t* counter = counters + segment.first_share * Tile::kRowTiles + rank;
    if (is_last_part(counter, num_parts, threadIdx.x == 0, &shared.is_last, kConsumersBarrier,
                     Tile::kConsumerThreads)) {
      merge(segment);
    }
  }

  __device__ __forceinline__ void run() const {
    uint32_t parities = 0;  // bit 0: of the stage; bit 1: of segments
    while (true) {
      shared.queries_full.wait(parities >> 1);
      const Segment& segment = shared.segments[parities >> 1];
      if (segment.begin == segment.end) break;
      Rows rows;
#pragma unroll
      for (float& value : rows.out) value = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) rows.limit[i] = segment.limit(row() + 8 * i, call.heads);
      rows.clear_end = segment.limit(0, call.heads) + 1;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices(rows.rope[k], matrices(shared.weights[0], k));
      }
      // Before weights take the place of the queries' rotated part.
      named_barrier_sync(kConsumersBarrier, Tile::kConsumerThreads);
      for (int tile = segment.begin + kOwn; tile < segment.end; tile += 2) {
        attend(rows, segment, tile, parities & 1);
        parities ^= 1;
        if (kOwn == 0 && tile + 1 < segment.end) attend_others(rows);
      }
      if (kOwn == 1 && (segment.end - segment.begin) % 2 == 1) attend_others(rows);
      fence_async_shared();  // TMA writes where weights were
      __syncwarp();
      if (lane_index() == 0) shared.queries_empty.arrive();
      finish(rows, segment);
      parities ^= 2;
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
    shared.queries_empty.init(2 * kWarps);
    for (int stage = 0; stage < 2; ++stage) {
      for (Barrier& full : shared.keys_full[stage]) full.init(1);
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
  grid_dependency_wait();
  launch_dependents();

  const typename Tile::List list = {kv_lens, cu_q, batch, 1, heads, 0};
  const Shares shares = shares_of(shared.planner.shares(list).total, gridDim.x / kRowTiles, least);
  const int share = blockIdx.x / kRowTiles, rank = blockIdx.x % kRowTiles;
  if (rank == 0 && threadIdx.x == 0) tasks[share].num_parts = 0;
  if (share < shares.num_blocks) {
    const auto first = shared.planner.find(list, shares, shares.begin(share));
    const int warpgroup = warp_index() / 4;
    const LatentAttention<T, T> call = {q,   kv_cache, block_table, kv_lens,     cu_q,    out,
                                        lse, batch,    heads,       table_width, sm_scale};
    const Partials<Tile::BLOCK_M * kRowTiles> partials = {memory};
    if (warpgroup == 2) {
      decrease_registers<Tile::kProducerRegisters>();
      if (warp_index() % 4 == 0) {
        LatentProducer<Tile>{shared, map_q,       map_kv,    block_table,
                             heads,  table_width, num_slots, rank}
            .run({list, shares, share, rank}, first);
      }
    } else {
      increase_registers<Tile::kConsumerRegisters>();
      if (warpgroup == 0) {
        LatentConsumer<Tile, 0>{shared, call, partials, counters, tasks, few, share, rank}.run();
      } else {
        LatentConsumer<Tile, 1>{shared, call, partials, counters, tasks, few, share, rank}.run();
      }
    }
  }
  // A block must stay while its peer may give stages back to it.
  if constexpr (kClusterSize > 1) cluster_sync();
}

}  // namespace kernelcat
