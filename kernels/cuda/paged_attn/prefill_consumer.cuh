// What a consumer warpgroup of paged_attn/wgmma does with its 64 rows.
#pragma once

#include <kernelcat/fragments.cuh>
#include <kernelcat/running_softmax.cuh>
#include <kernelcat/stage_release.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/wgmma_rs.cuh>

#include "prefill_tile.cuh"
#include "softcap.cuh"

namespace kernelcat {

// Named barriers; 0 is __syncthreads'. Each warpgroup has a turn barrier.
constexpr int kTurnBarrier = 1;
constexpr int kConsumersBarrier = 4;

// Makes the compiler compute the row sums, and with them all exponentials, before what follows:
// ptxas moves a softmax behind the wait for products that it could have run beside, but not past a
// store.
__device__ __forceinline__ void complete_softmax(float& unread, const float (&row_sum)[2]) {
  asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(shared_address(&unread)),
               "f"(row_sum[0] + row_sum[1])
               : "memory");
}

template <typename Tile>
struct PrefillConsumer {
  using Kind = typename Tile::Kind;
  using T = typename Tile::T;
  using State = PipelineState<Tile::kNumStages>;
  static constexpr int BLOCK_N = Tile::BLOCK_N, kHeadDim = Tile::kHeadDim;
  static constexpr int kSteps = BLOCK_N / kWgmmaK;
  static constexpr bool kTakesTurns = Tile::kNumConsumers > 1;
  using Scores = float[BLOCK_N / 2];

  struct Rows {
    float accumulators[kHeadDim / 2];
    uint32_t weights[kSteps][4];
    RunningSoftmax softmax;
    float rescale[2] = {1.0f, 1.0f};  // the accumulators are yet to be multiplied by
    int last_visible[2];              // the last tokens that the lane's two rows see
  };

  PrefillShared<Tile>& shared;
  const AttentionArgs<Kind>& args;
  int warpgroup;

  __device__ __forceinline__ void wait_for_turn() const {
    named_barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_turn() const {
    const int next = warpgroup + 1 == Tile::kNumConsumers ? 0 : warpgroup + 1;
    named_barrier_arrive(kTurnBarrier + next, 2 * kWarpgroupThreads);
  }

  // Starts scores = queries @ keys^T.
  __device__ __forceinline__ void multiply_keys(Scores& scores, int stage) const {
    const uint64_t a = swizzled_rows_descriptor(shared_address(shared.queries[0]) +
                                                warpgroup * kWgmmaM * kRowBytes);
    const uint64_t b = swizzled_rows_descriptor(shared_address(shared.keys[stage][0]));
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
#pragma unroll
      for (int k = 0; k < Tile::kChunkColumns / kWgmmaK; ++k) {
        const int offset = k * kWgmmaK * 2;
        Wgmma<T, BLOCK_N>::multiply(scores, advanced(a, chunk * Tile::BLOCK_M * kRowBytes + offset),
                                    advanced(b, chunk * BLOCK_N * kRowBytes + offset),
                                    chunk + k > 0);
      }
    }
    wgmma_commit();
    pin(scores);
  }

  // Starts rows.accumulators += rows.weights @ values.
  __device__ __forceinline__ void multiply_values(Rows& rows, int stage) const {
    const uint64_t b =
        swizzled_values_descriptor(shared_address(shared.values[stage][0]), BLOCK_N * kRowBytes);
    pin(rows.accumulators);
    pin(rows.weights);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      WgmmaRs<T, kHeadDim, OperandB::kRowsOfK>::multiply(
          rows.accumulators, rows.weights[k], advanced(b, k * kWgmmaK * kRowBytes), true);
    }
    wgmma_commit();
    pin(rows.accumulators);
  }

  // Replaces the scores of a tile by weights and sets rows.rescale.
  template <bool kMasked>
  __device__ __forceinline__ void exponentiate(Rows& rows, Scores& scores, int tile,
                                               float k_scale) const {
    float factor = args.sm_scale * kLog2E;
    if constexpr (Kind::kScales == Scales::kHead) {
#pragma unroll
      for (float& score : scores) score *= k_scale;
    }
    if constexpr (Kind::kSoftcap) {
      const float inner = 2.0f * kLog2E * args.sm_scale / args.softcap;
#pragma unroll
      for (float& score : scores) score = cap_score(score * inner, args.softcap);
      factor = kLog2E;
    }
    if constexpr (kMasked) {
      const int first = tile * BLOCK_N + lane_index() % 4 * 2;
#pragma unroll
      for (int i = 0; i < BLOCK_N / 2; ++i) {
        const int ahead = first + i / 4 * 8 + i % 2 - rows.last_visible[i / 2 % 2];
        if (ahead > 0 || (Kind::kWindow && ahead <= -args.window)) scores[i] = -kInfinity;
      }
    }
    // A factor of zero would turn masked scores into NaN.
    rows.softmax.add(reinterpret_cast<float (&)[BLOCK_N / 8][4]>(scores), fmaxf(factor, 1e-30f),
                     rows.rescale);
  }

  static __device__ __forceinline__ void round_weights(Rows& rows, const Scores& weights) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) {
      rows.weights[i / 4][i % 4] = pack<T>(weights[2 * i], weights[2 * i + 1]);
    }
  }

  // After the first few tiles the row max rarely grows, and there is nothing to do.
  static __device__ __forceinline__ void rescale_accumulators(Rows& rows) {
    if (!__any_sync(0xffffffff, rows.rescale[0] != 1.0f || rows.rescale[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) rows.accumulators[i] *= rows.rescale[i / 2 % 2];
  }

  // Multiplies the values of the tile before, and meanwhile makes weights of the keys of `tile`.
  template <bool kMasked>
  __device__ __forceinline__ void attend(Rows& rows, State& keys, State& values, int tile,
                                         float k_scale) const {
    Scores scores;
    shared.keys_full[keys.stage].wait(keys.phase);
    if (kTakesTurns) wait_for_turn();
    multiply_keys(scores, keys.stage);
    pin(rows.accumulators);
    rescale_accumulators(rows);  // while the scores are multiplied
    shared.values_full[values.stage].wait(values.phase);
    multiply_values(rows, values.stage);
    if (kTakesTurns) pass_turn();
    wgmma_wait<1>();
    pin(scores);
    release_stage<Tile::kClusterSize>(shared.keys_empty[keys.stage]);
    exponentiate<kMasked>(rows, scores, tile, k_scale);
    complete_softmax(shared.unread[threadIdx.x], rows.softmax.row_sum);
    wgmma_wait<0>();
    pin(rows.accumulators);
    pin(rows.weights);
    release_stage<Tile::kClusterSize>(shared.values_empty[values.stage]);
    round_weights(rows, scores);
    keys.advance();
    values.advance();
  }

  // Multiplies the values of the last tile.
  __device__ __forceinline__ void attend_last(Rows& rows, State& values) const {
    shared.values_full[values.stage].wait(values.phase);
    rescale_accumulators(rows);
    multiply_values(rows, values.stage);
    wgmma_wait<0>();
    pin(rows.accumulators);
    release_stage<Tile::kClusterSize>(shared.values_empty[values.stage]);
    values.advance();
  }

  // Zeroes the values beyond the sequence's last token, as far as its box reaches: these slots may
  // hold NaN, which a weight of zero does not remove.
  __device__ __forceinline__ void clear_unused(const RowTile& tile, const State& values) const {
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

  // Divides by the softmax's denominators and stores. `first_row` is the upper one of the lane's
  // two rows.
  __device__ __forceinline__ void store(Rows& rows, const RowTile& tile, int first_row) const {
    const int group = args.group(), lane = lane_index();
    rows.softmax.reduce_row_sums();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * i;
      const bool is_inside = row < tile.num_queries * group;
      const int head = tile.kv_head * group + row % group;
      const int64_t token = tile.sequence.first_query + tile.first_query + row / group;
      const int64_t out_row = token * args.heads + head;
      RowEnd end;
      if constexpr (Kind::kSinks) {
        const float sink = is_inside ? __ldg(args.sinks + head) : 0.0f;
        end = RowEnd::with_sink(rows.softmax.row_max[i], rows.softmax.row_sum[i], sink);
      } else {
        end = RowEnd::of(rows.softmax.row_max[i], rows.softmax.row_sum[i]);
      }
      if (is_inside && lane % 4 == 0) args.lse[out_row] = end.lse;
      if constexpr (Kind::kScales == Scales::kHead) {
        end.factor *= __ldg(args.v_scale + tile.kv_head);
      }
      T* out = args.out + out_row * kHeadDim + lane % 4 * 8;
#pragma unroll
      for (int column = 0; column < kHeadDim; column += 32) {
        uint32_t matrices[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = rows.accumulators + column / 2 + 4 * j + 2 * i;
          matrices[j] = pack<T>(pair[0] * end.factor, pair[1] * end.factor);
        }
        const uint4 eight = gather_rows(matrices);
        if (is_inside) *reinterpret_cast<uint4*>(out + column) = eight;
      }
    }
  }

  // All KV tiles of a row tile, from the last to the first.
  __device__ __forceinline__ void attend_row_tile(const RowTile& tile, State& keys,
                                                  State& values) const {
    const int first_row = warpgroup * kWgmmaM + warp_index() % 4 * 16 + lane_index() / 4;
    Rows rows;
#pragma unroll
    for (float& value : rows.accumulators) value = 0.0f;
    Scores scores;
    shared.keys_full[keys.stage].wait(keys.phase);
    multiply_keys(scores, keys.stage);

    // While the first scores are multiplied, the lanes work out what their rows see.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.last_visible[i] = tile.first_query_limit() + (first_row + 8 * i) / args.group();
    }
    float k_scale = 1.0f;
    if constexpr (Kind::kScales == Scales::kHead) k_scale = __ldg(args.k_scale + tile.kv_head);
    // All rows see all tokens of tiles [unmasked_begin, unmasked_end).
    const int begin = tile.begin;
    const int unmasked_end = max((tile.first_query_limit() + 1) / BLOCK_N, begin);
    int unmasked_begin = begin;
    if constexpr (Kind::kWindow) {
      const int first_token = max(tile.last_query_limit() + 1 - args.window, 0);
      unmasked_begin = max(ceil_div(first_token, BLOCK_N), begin);
    }
    clear_unused(tile, values);

    int i = tile.end - 1;
    wgmma_wait<0>();
    pin(scores);
    release_stage<Tile::kClusterSize>(shared.keys_empty[keys.stage]);
    keys.advance();
    exponentiate<true>(rows, scores, i, k_scale);
    round_weights(rows, scores);
    for (--i; i >= unmasked_end; --i) attend<true>(rows, keys, values, i, k_scale);
    for (; i >= unmasked_begin; --i) attend<false>(rows, keys, values, i, k_scale);
    if constexpr (Kind::kWindow) {
      for (; i >= begin; --i) attend<true>(rows, keys, values, i, k_scale);
    }
    if (lane_index() == 0) shared.queries_empty.arrive();
    attend_last(rows, values);
    store(rows, tile, first_row);
  }

  __device__ __forceinline__ void run() const {
    State keys, values;
    PipelineState<1> queries;
    // The last warpgroup gives the first its first turn.
    if (kTakesTurns && warpgroup + 1 == Tile::kNumConsumers) pass_turn();
    while (true) {
      shared.queries_full.wait(queries.phase);
      const RowTile& tile = shared.row_tiles[queries.phase];
      if (!tile.exists()) break;
      attend_row_tile(tile, keys, values);
      queries.advance();
    }
  }
};

}  // namespace kernelcat
