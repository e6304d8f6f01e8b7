// Attention of many query tokens over a paged cache on Hopper: one warp feeds rings of keys and of
// values by TMA, page by page; two or three warpgroups multiply by wgmma, 64 rows each.
//
// A warpgroup starts the scores of a tile and the weighted values of the one before together, and
// works on the softmax while the tensor cores do the rest; warpgroups take turns, so that one's
// softmax falls into another's products (FlashAttention-3). The blocks are persistent: the next
// queries and keys are on their way while the last rows are stored.
#include <kernelcat/cluster.cuh>
#include <kernelcat/fragments.cuh>

#include "prefill_tile.cuh"
#include "running_softmax.cuh"
#include "tensor_box.cuh"
#include "wgmma_values.cuh"

namespace kernelcat {

// Barrier 0 is __syncthreads'.
constexpr int kTurnBarrier = 1;  // and one for each warpgroup
constexpr int kConsumersBarrier = 4;

// Has the totals ready, and with them all exponentials, before what comes next: ptxas moves a
// softmax behind the wait for products that it could have hidden in, but not past a store.
__device__ __forceinline__ void keep_before(float& shared, const float (&totals)[2]) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(shared_address(&shared)),
               "f"(totals[0] + totals[1])
               : "memory");
}

template <int kCount, int kWords>
__device__ __forceinline__ void pin(uint32_t (&values)[kCount][kWords]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) asm volatile("" : "+r"(values[i][j])::"memory");
  }
}

// Runs in one warp.
template <typename Tile>
struct PrefillProducer {
  using Position = PipelineState<Tile::kNumStages>;
  PrefillShared<Tile>& shared;
  const TensorMap &map_q, &map_k, &map_v;
  const int* block_table;
  int table_width, num_slots, group, rank;

  // Where in the cache the lane's box of a tile of tokens begins: beyond its end, which makes
  // zeros, where the sequence has no tokens.
  __device__ __forceinline__ int slot_of(const RowTile& rows, int tile) const {
    const int box = rank * Tile::kBoxes + lane_index();
    const int token = tile * Tile::BLOCK_N + box * Tile::kBoxTokens;
    if (lane_index() >= Tile::kBoxes || token >= rows.sequence.num_tokens) return num_slots;
    const int64_t entry = static_cast<int64_t>(rows.index) * table_width + token / Tile::kPageSize;
    return __ldg(block_table + entry) * Tile::kPageSize + token % Tile::kPageSize;
  }

  __device__ __forceinline__ void load_queries(const RowTile& rows, uint32_t phase) const {
    shared.queries_empty.wait(phase ^ 1);
    if (lane_index() == 0) {
      shared.queries_full.arrive_expect(Tile::BLOCK_M / group * group * kRowBytes * Tile::kChunks);
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        tensor_load_4d(shared.queries[chunk], map_q, chunk * Tile::kColumns, 0, rows.kv_head,
                       rows.sequence.first_query + rows.first, shared.queries_full);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load(uint8_t (&stage)[Tile::kChunks][Tile::BLOCK_N * kRowBytes],
                                       const TensorMap& map, Barrier& empty, Barrier& full,
                                       Position& position, int kv_head, int slot) const {
    empty.wait(position.phase ^ 1);
    const int lane = lane_index();
    if (lane == 0) full.arrive_expect(Tile::kTileBytes);
    __syncwarp();
    if (lane < Tile::kBoxes) {
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        uint8_t* box = stage[chunk] + (rank * Tile::kBoxes + lane) * Tile::kBoxTokens * kRowBytes;
        const int column = chunk * Tile::kColumns;
        if constexpr (Tile::kClusterSize == 1) {
          tensor_load_3d(box, map, column, kv_head, slot, full);
        } else {
          tensor_load_multicast_3d(box, map, column, kv_head, slot, full,
                                   (1 << Tile::kClusterSize) - 1);
        }
      }
    }
    __syncwarp();
    position.advance();
  }

  __device__ __forceinline__ void load_keys(Position& at, const RowTile& rows, int slot) const {
    load(shared.keys[at.stage], map_k, shared.keys_empty[at.stage], shared.keys_full[at.stage], at,
         rows.kv_head, slot);
  }
  __device__ __forceinline__ void load_values(Position& at, const RowTile& rows, int slot) const {
    load(shared.values[at.stage], map_v, shared.values_empty[at.stage],
         shared.values_full[at.stage], at, rows.kv_head, slot);
  }

  // Values follow the keys one tile behind, as they are consumed.
  __device__ __forceinline__ void run(const PrefillSchedule<Tile>& schedule) const {
    Position keys, values;
    uint32_t phase = 0;
    schedule.for_each([&](const RowTile& rows) {
      int slot = slot_of(rows, rows.end - 1);
      load_keys(keys, rows, slot);
      load_queries(rows, phase);
      phase ^= 1;
      for (int tile = rows.end - 2; tile >= rows.begin; --tile) {
        const int next = slot_of(rows, tile);
        load_keys(keys, rows, next);
        load_values(values, rows, slot);
        slot = next;
      }
      load_values(values, rows, slot);
    });
  }
};

// Runs in a consumer warpgroup.
template <typename Tile>
struct PrefillConsumer {
  using Kind = typename Tile::Kind;
  using T = typename Tile::T;
  using Position = PipelineState<Tile::kNumStages>;
  static constexpr int BLOCK_N = Tile::BLOCK_N, kHeadDim = Tile::kHeadDim;
  static constexpr int kSteps = BLOCK_N / kWgmmaK;
  static constexpr bool kTurns = Tile::kNumConsumers > 1;

  struct Rows {
    float out[kHeadDim / 2];
    uint32_t weights[kSteps][4];
    RunningSoftmax softmax;
    float kept[2] = {1.0f, 1.0f};  // of what was summed, by the scores seen since
    int limit[2];                  // the last tokens that the lane's two rows see
  };

  PrefillShared<Tile>& shared;
  const Attention<Kind>& call;
  int consumer;

  __device__ __forceinline__ void wait_for_turn() const {
    named_barrier_sync(kTurnBarrier + consumer, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = consumer + 1 == Tile::kNumConsumers ? 0 : consumer + 1;
    named_barrier_arrive(kTurnBarrier + next, 2 * kWarpgroupThreads);
  }
  // Every block that loads into a stage must know that a warp is done with it.
  static __device__ __forceinline__ void release_stage(Barrier& empty) {
    if constexpr (Tile::kClusterSize == 1) {
      if (lane_index() == 0) empty.arrive();
    } else {
      if (lane_index() < Tile::kClusterSize) arrive_remote(empty, lane_index());
    }
  }

  // Starts scores = queries @ keys^T.
  __device__ __forceinline__ void multiply_keys(float (&scores)[BLOCK_N / 2], int stage) const {
    const uint64_t a = swizzled_rows_descriptor(shared_address(shared.queries[0]) +
                                                consumer * kWgmmaM * kRowBytes);
    const uint64_t b = swizzled_rows_descriptor(shared_address(shared.keys[stage][0]));
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
#pragma unroll
      for (int k = 0; k < Tile::kColumns / kWgmmaK; ++k) {
        const int within = k * kWgmmaK * 2;
        Wgmma<T, BLOCK_N>::multiply(scores, advanced(a, chunk * Tile::BLOCK_M * kRowBytes + within),
                                    advanced(b, chunk * BLOCK_N * kRowBytes + within),
                                    chunk + k > 0);
      }
    }
    wgmma_commit();
    pin(scores);
  }

  // Starts rows.out += weights @ values.
  __device__ __forceinline__ void multiply_values(Rows& rows, int stage) const {
    const uint64_t b =
        swizzled_values_descriptor(shared_address(shared.values[stage][0]), BLOCK_N * kRowBytes);
    pin(rows.out);
    pin(rows.weights);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      WgmmaValues<T, kHeadDim>::multiply(rows.out, rows.weights[k],
                                         advanced(b, k * kWgmmaK * kRowBytes));
    }
    wgmma_commit();
    pin(rows.out);
  }

  // Scores of a tile become weights; rows.kept is what the sums are then to be multiplied by.
  template <bool kHides>
  __device__ __forceinline__ void exponentiate(Rows& rows, float (&scores)[BLOCK_N / 2], int tile,
                                               float k_scale) const {
    float factor = call.sm_scale * kLog2E;
    if constexpr (Kind::kScales == Scales::kHead) {
#pragma unroll
      for (float& score : scores) score *= k_scale;
    }
    if constexpr (Kind::kSoftcap) {  // tanh(x) = 1 - 2 / (1 + exp(2 x))
      const float inner = 2.0f * kLog2E * call.sm_scale / call.softcap;
#pragma unroll
      for (float& score : scores) {
        score = call.softcap - __fdividef(2.0f * call.softcap, 1.0f + fast_exp2(score * inner));
      }
      factor = kLog2E;
    }
    if constexpr (kHides) {
      const int first = tile * BLOCK_N + lane_index() % 4 * 2;
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) {
        const int ahead = first + i / 4 * 8 + i % 2 - rows.limit[i / 2 % 2];
        if (ahead > 0 || (Kind::kWindow && ahead <= -call.window)) scores[i] = -kInfinity;
      }
    }
    // A factor of zero would make NaN of what is hidden.
    rows.softmax.add(reinterpret_cast<float (&)[BLOCK_N / 8][4]>(scores), fmaxf(factor, 1e-30f),
                     rows.kept);
  }

  static __device__ __forceinline__ void round(Rows& rows, const float (&weights)[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) {
      rows.weights[i / 4][i % 4] = pack<T>(weights[2 * i], weights[2 * i + 1]);
    }
  }

  // Once the largest scores have been seen, most tiles change nothing.
  static __device__ __forceinline__ void rescale(Rows& rows) {
    if (!__any_sync(0xffffffff, rows.kept[0] != 1.0f || rows.kept[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) rows.out[i] *= rows.kept[i / 2 % 2];
  }

  // The scores of one more tile, while the values of the one before are multiplied.
  template <bool kHides>
  __device__ __forceinline__ void attend(Rows& rows, Position& keys, Position& values, int tile,
                                         float k_scale) const {
    float scores[BLOCK_N / 2];
    shared.keys_full[keys.stage].wait(keys.phase);
    if (kTurns) wait_for_turn();
    multiply_keys(scores, keys.stage);
    pin(rows.out);
    rescale(rows);  // hidden behind the scores
    shared.values_full[values.stage].wait(values.phase);
    multiply_values(rows, values.stage);
    if (kTurns) pass_turn();
    wgmma_wait<1>();
    pin(scores);
    release_stage(shared.keys_empty[keys.stage]);
    exponentiate<kHides>(rows, scores, tile, k_scale);
    keep_before(shared.totals[threadIdx.x], rows.softmax.total);
    wgmma_wait<0>();
    pin(rows.out);
    pin(rows.weights);
    release_stage(shared.values_empty[values.stage]);
    round(rows, scores);
    keys.advance();
    values.advance();
  }

  // Slots that hold none of the sequence's tokens may hold NaN, which weights of zero do not undo.
  __device__ __forceinline__ void clear_unused(const RowTile& tile, const Position& values) const {
    const int first = tile.sequence.num_tokens - (tile.end - 1) * BLOCK_N;
    if (first >= BLOCK_N || first % Tile::kBoxTokens == 0) return;
    const int end = ceil_div(first, Tile::kBoxTokens) * Tile::kBoxTokens;
    const int units = (end - first) * (kRowBytes / 16);
    shared.values_full[values.stage].wait(values.phase);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      uint4* rows = reinterpret_cast<uint4*>(shared.values[values.stage][chunk]);
      for (int i = threadIdx.x; i < units; i += Tile::kConsumerThreads) {
        rows[first * (kRowBytes / 16) + i] = {};
      }
    }
    fence_async_shared();
    named_barrier_sync(kConsumersBarrier, Tile::kConsumerThreads);
  }

  // Divides by the softmax's denominators and stores.
  __device__ __forceinline__ void store(Rows& rows, const RowTile& tile, int first_row) const {
    const int group = call.group(), lane = lane_index();
    rows.softmax.end();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * i;
      const bool is_live = row < tile.size * group;
      const int head = tile.kv_head * group + row % group;
      const int64_t token = tile.sequence.first_query + tile.first + row / group;
      const int64_t place = token * call.heads + head;
      RowEnd end;
      if constexpr (Kind::kSinks) {
        const float sink = is_live ? __ldg(call.sinks + head) : 0.0f;
        end = RowEnd::with_sink(rows.softmax.most[i], rows.softmax.total[i], sink);
      } else {
        end = RowEnd::of(rows.softmax.most[i], rows.softmax.total[i]);
      }
      if (is_live && lane % 4 == 0) call.lse[place] = end.lse;
      if constexpr (Kind::kScales == Scales::kHead) {
        end.factor *= __ldg(call.v_scale + tile.kv_head);
      }
      T* out = call.out + place * kHeadDim + lane % 4 * 8;
#pragma unroll
      for (int column = 0; column < kHeadDim; column += 32) {
        uint32_t matrices[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = column / 2 + 4 * j + 2 * i;
          matrices[j] = pack<T>(rows.out[at] * end.factor, rows.out[at + 1] * end.factor);
        }
        const uint4 eight = gather_rows(matrices);
        if (is_live) *reinterpret_cast<uint4*>(out + column) = eight;
      }
    }
  }

  __device__ __forceinline__ void run(const PrefillSchedule<Tile>& schedule) const {
    Position keys, values;
    uint32_t phase = 0;
    if (kTurns && consumer + 1 == Tile::kNumConsumers) pass_turn();  // the first may begin
    schedule.for_each([&](const RowTile& tile) {
      const int first_row = consumer * kWgmmaM + warp_index() % 4 * 16 + lane_index() / 4;
      Rows rows;
#pragma unroll
      for (float& value : rows.out) value = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows.limit[i] = tile.first_limit() + (first_row + 8 * i) / call.group();
      }
      float k_scale = 1.0f;
      if constexpr (Kind::kScales == Scales::kHead) k_scale = __ldg(call.k_scale + tile.kv_head);
      // Tiles [clear_begin, clear_end) are seen by all rows from end to end.
      const int clear_end = max((tile.first_limit() + 1) / BLOCK_N, tile.begin);
      const int clear_begin =
          Kind::kWindow ? ceil_div(max(tile.last_limit() + 1 - call.window, 0), BLOCK_N) : 0;

      clear_unused(tile, values);
      shared.queries_full.wait(phase);
      phase ^= 1;
      int i = tile.end - 1;
      {
        float scores[BLOCK_N / 2];
        shared.keys_full[keys.stage].wait(keys.phase);
        multiply_keys(scores, keys.stage);
        wgmma_wait<0>();
        pin(scores);
        release_stage(shared.keys_empty[keys.stage]);
        keys.advance();
        exponentiate<true>(rows, scores, i, k_scale);
        round(rows, scores);
      }
      for (--i; i >= max(clear_end, tile.begin); --i) attend<true>(rows, keys, values, i, k_scale);
      for (; i >= max(clear_begin, tile.begin); --i) attend<false>(rows, keys, values, i, k_scale);
      if constexpr (Kind::kWindow) {
        for (; i >= tile.begin; --i) attend<true>(rows, keys, values, i, k_scale);
      }
      if (lane_index() == 0) shared.queries_empty.arrive();
      shared.values_full[values.stage].wait(values.phase);
      rescale(rows);
      multiply_values(rows, values.stage);
      wgmma_wait<0>();
      pin(rows.out);
      release_stage(shared.values_empty[values.stage]);
      values.advance();
      store(rows, tile, first_row);
    });
  }
};

template <typename Kind, int BLOCK_M, int BLOCK_N, int kNumStages, int kClusterSize,
          typename Tile = PrefillTile<Kind, BLOCK_M, BLOCK_N, kNumStages, kClusterSize>>
__global__ void __launch_bounds__(Tile::kNumThreads, 1) paged_attn_wgmma(
    const __grid_constant__ TensorMap map_q,  // (tokens, kv_heads, group, head_dim)
    const __grid_constant__ TensorMap map_k,  // (slots, kv_heads, head_dim)
    const __grid_constant__ TensorMap map_v,  // the same
    const typename Kind::T* q, const typename Kind::Cached* k_cache,
    const typename Kind::Cached* v_cache, const int* block_table, const int* kv_lens,
    const int* cu_q, const float* sinks, const float* k_scale, const float* v_scale,
    const float8_e4m3fn* k_block_scale, const float8_e4m3fn* v_block_scale, typename Kind::T* out,
    float* lse, int batch, int heads, int kv_heads, int table_width, int window, float sm_scale,
    float softcap, int num_slots, int num_row_tiles) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<PrefillShared<Tile>*>(dynamic_shared + padding);
  if (threadIdx.x == 0) {
    prefetch_map(map_q);
    prefetch_map(map_k);
    prefetch_map(map_v);
    constexpr int kWarps = Tile::kConsumerThreads / kWarpThreads;
    shared.queries_full.init(1);
    shared.queries_empty.init(kWarps);
    for (int i = 0; i < kNumStages; ++i) {
      shared.keys_full[i].init(1);
      shared.values_full[i].init(1);
      shared.keys_empty[i].init(kWarps * kClusterSize);
      shared.values_empty[i].init(kWarps * kClusterSize);
    }
    fence_barrier_init();
  }
  if constexpr (kClusterSize > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }

  const Attention<Kind> call = {q,        k_cache, v_cache, block_table,   kv_lens,       cu_q,
                                sinks,    k_scale, v_scale, k_block_scale, v_block_scale, out,
                                lse,      batch,   heads,   kv_heads,      table_width,   window,
                                sm_scale, softcap};
  const int rank = kClusterSize > 1 ? cluster_rank() : 0;
  const PrefillSchedule<Tile> schedule = {kv_lens,      cu_q,   batch,         kv_heads,
                                          call.group(), window, num_row_tiles, rank};
  const int warpgroup = warp_index() / 4;
  if (warpgroup == Tile::kNumConsumers) {
    decrease_registers<Tile::kProducerRegisters>();
    if (warp_index() % 4 == 0) {
      PrefillProducer<Tile>{shared,      map_q,     map_k,        map_v, block_table,
                            table_width, num_slots, call.group(), rank}
          .run(schedule);
    }
  } else {
    increase_registers<Tile::kConsumerRegisters>();
    PrefillConsumer<Tile>{shared, call, warpgroup}.run(schedule);
  }
  // A block must stay while its peer may give stages back to it.
  if constexpr (kClusterSize > 1) cluster_sync();
}

}  // namespace kernelcat
