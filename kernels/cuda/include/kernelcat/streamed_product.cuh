// Products of a few rows of activations and many rows of weights, which stream once from global
// memory through a ring: Z = X W^T, for up to 64 tokens.
//
// A persistent thread block has a range of groups of eight rows of W. One warp copies weights, all
// other warps share each stage: each multiplies its own columns, and holds the activations of these
// columns in registers while it goes over the round's groups. So each thread block reads
// activations once a round, and the sums of the warps are added up once a round, in a fixed order.
// One more warp meanwhile loads what the results need beside the sums, such as biases.
#pragma once

#include <kernelcat/left_operand.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/pdl.cuh>

namespace kernelcat {

// kTokens is 8, or a multiple of 16. A round has kGroups groups.
template <typename T_, RowNorm kNorm_, int kTokens_, int kGroups_, int kNumWarps_, int kChunks_,
          int kNumStages_>
struct ProductKind {
  using T = T_;
  using Ring = RowRing<kNumWarps_, kChunks_, kNumStages_>;
  static constexpr RowNorm kNorm = kNorm_;
  static constexpr int kTokens = kTokens_, kGroups = kGroups_;
  static constexpr int kNumWarps = kNumWarps_, kChunks = kChunks_, kNumStages = kNumStages_;
  static constexpr int kHalves = kTokens / 8, kTiles = ceil_div(kTokens, 16);
  static constexpr int kThreads = (kNumWarps + 2) * kWarpThreads;
  using Left = LeftOperand<T, kNorm, kTokens, kNumWarps, kChunks>;
};

// Results are computed in pairs: the sums of two adjacent rows of W for one token. Pairs are
// numbered as the lanes of a warp have them: by group, half of a product's rows, and lane.
template <typename Kind, typename Extra>
struct ProductShared {
  static constexpr int kPairs = Kind::kGroups * Kind::kHalves * kWarpThreads;

  typename Kind::Ring ring;
  float2 sums[Kind::kNumWarps][kPairs];
  float squares[Kind::kNumWarps][Kind::kTokens];  // of a warp's columns; kBefore: [0] of whole rows
  Extra extra[kPairs];
};

// Rows of weights that are one array.
template <typename T>
struct WeightRows {
  const T* weights;  // (rows, k)
  int k;

  __device__ __forceinline__ RowGroup<T> operator()(int row) const {
    const T* first = weights + static_cast<int64_t>(row) * k;
    return {first, first + k, 2 * static_cast<int64_t>(k)};
  }
};

// One thread block's part of a product. `Output` says what becomes of the sums:
//   Extra : what a pair of results needs beside its sums
//   prepare() : called by one warp before `load`
//   load(row, token) : the Extra of rows `row` and `row + 1`, as loaded, without arithmetic
//   store(extra, row, token, z) : takes both results
template <typename Kind, typename Output, typename GroupAt>
struct StreamedProduct {
  using T = typename Kind::T;
  using Ring = typename Kind::Ring;
  using Shared = ProductShared<Kind, typename Output::Extra>;
  static constexpr int kNumWarps = Kind::kNumWarps, kGroups = Kind::kGroups;
  static constexpr int kHalves = Kind::kHalves, kTiles = Kind::kTiles;

  Shared& shared;
  GroupRange groups;
  int num_rows;      // of W
  GroupAt group_at;  // first row of a group -> where its rows are
  ActivationRows<T> rows;
  Output output;

  // All threads of the thread block call this.
  __device__ __forceinline__ void run() {
    const int warp = warp_index();
    if (threadIdx.x == 0) shared.ring.init();
    __syncthreads();
    if (warp == kNumWarps) {
      launch_dependents();
      // No kernel writes weights, so they are loaded before the kernels before this one have ended.
      if (elect_one()) {
        shared.ring.template fill<kGroups, T>(groups, num_rows, rows.k, group_at);
      }
      return;
    }
    grid_dependency_wait();
    // Both roles share the loop over rounds, so that each barrier stands at one place in the code.
    const bool multiplies = warp < kNumWarps;
    Progress progress = {.num_refills =
                             num_slices() * (groups.end - groups.begin) - Kind::kNumStages};
    if (multiplies) {
      load_factors(progress.factors, warp);
    } else {
      output.prepare();
    }
    for (int first = groups.begin; first < groups.end; first += kGroups) {
      if (multiplies) {
        multiply(first, progress, warp);
      } else {
        load_extra(first);
      }
      sync();
      if (multiplies) store_results(first);
      if (first + kGroups < groups.end) sync();
    }
  }

 private:
  // What a warp that multiplies carries from round to round.
  struct Progress {
    PipelineState<Kind::kNumStages> position = {};
    int num_refills;  // stages that the producer will fill again
    float factors[kHalves] = {};
  };

  struct Pair {
    int row, token;
  };

  // Pair `index` of a round whose first group is `first`.
  static __device__ __forceinline__ Pair pair_at(int index, int first) {
    const int lane = index % kWarpThreads, half = index / kWarpThreads % kHalves;
    const int group = first + index / (kWarpThreads * kHalves);
    return {group * kGroupRows + lane % 4 * 2, half * 8 + lane / 4};
  }

  __device__ __forceinline__ bool contains(Pair pair) const {
    return pair.row < num_rows && pair.token < rows.tokens;
  }

  __device__ __forceinline__ int num_slices() const { return ceil_div(rows.k, Ring::kSliceCols); }

  __device__ __forceinline__ int num_pairs(int first) const {
    return min(kGroups, groups.end - first) * kHalves * kWarpThreads;
  }

  // A barrier of all warps but the producer.
  static __device__ __forceinline__ void sync() {
    named_barrier_sync(1, (kNumWarps + 1) * kWarpThreads);
  }

  // The warp that loads the `extra` of a round's pairs, several at a time: nothing depends on a
  // value that is loaded until all loads of a batch have begun.
  __device__ __forceinline__ void load_extra(int first) {
    constexpr int kBatch = 8;
    const int count = num_pairs(first);
    for (int index = lane_index(); index < count; index += kBatch * kWarpThreads) {
      typename Output::Extra batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const Pair pair = pair_at(index + i * kWarpThreads, first);
        const bool is_pair = index + i * kWarpThreads < count && contains(pair);
        batch[i] = {};
        if (is_pair) batch[i] = output.load(pair.row, pair.token);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (index + i * kWarpThreads < count) shared.extra[index + i * kWarpThreads] = batch[i];
      }
    }
  }

  // 1 / root of each of the lane's tokens where rows are divided first, else 1.
  __device__ __forceinline__ void load_factors(float (&factors)[kHalves], int warp) {
    if constexpr (Kind::kNorm == RowNorm::kBefore) {
      for (int token = warp; token < rows.tokens; token += kNumWarps) {
        const float sum = warp_sum_squares(rows, token);
        if (lane_index() == 0) shared.squares[0][token] = sum;
      }
      named_barrier_sync(2, kNumWarps * kWarpThreads);
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int token = h * 8 + lane_index() / 4;
      factors[h] = 1.0f;
      if (Kind::kNorm == RowNorm::kBefore && token < rows.tokens) {
        factors[h] = rows.inverse_root(shared.squares[0][token]);
      }
    }
  }

  using Sums = float[kGroups][kTiles][4];

  // The products of a round, whose sums it shares.
  __device__ __forceinline__ void multiply(int first, Progress& progress, int warp) {
    Sums sums = {};
    float squares[kHalves] = {};
#pragma unroll 1
    for (int col = 0; col < rows.k; col += Ring::kSliceCols) {
      const int lane_col = col + warp * kChunkCols + lane_index() % 4 * 8;
      typename Kind::Left left;
      left.load(rows, lane_col, squares, progress.factors);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (first + g >= groups.end) break;
        multiply_stage(sums[g], left, progress.position, lane_col, warp);
        if (--progress.num_refills >= 0) {
          release_stage_after_loads(shared.ring.empty[progress.position.stage]);
        }
        progress.position.advance();
      }
    }
    share(sums, squares, warp);
  }

  // Adds the products of one stage.
  __device__ __forceinline__ void multiply_stage(float (&sums)[kTiles][4],
                                                 const typename Kind::Left& left,
                                                 const PipelineState<Kind::kNumStages>& position,
                                                 int lane_col, int warp) {
    const int lane = lane_index();
    const uint8_t* lane_weights = shared.ring.stages[position.stage] +
                                  lane / 4 * Ring::kPitchBytes + warp * kChunkBytes + lane % 4 * 16;
    shared.ring.full[position.stage].wait(position.phase);
    uint4 weights[Kind::kChunks];
#pragma unroll
    for (int c = 0; c < Kind::kChunks; ++c) {
      weights[c] = uint4{};  // beyond the last column
      if (lane_col + c * kNumWarps * kChunkCols < rows.k) {
        weights[c] = *reinterpret_cast<const uint4*>(lane_weights + c * kNumWarps * kChunkBytes);
      }
    }
#pragma unroll
    for (int c = 0; c < Kind::kChunks; ++c) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint32_t a[4];
        left.fragment(a, c, t, 0);
        mma_16x8x16<T>(sums[t], a, weights[c].x, weights[c].y);
        left.fragment(a, c, t, 1);
        mma_16x8x16<T>(sums[t], a, weights[c].z, weights[c].w);
      }
    }
  }

  // Leaves the warp's sums, and those of squares, to the threads that store results.
  __device__ __forceinline__ void share(const Sums& sums, const float (&squares)[kHalves],
                                        int warp) {
    const int lane = lane_index();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const float* pair = sums[g][h / 2] + h % 2 * 2;
        shared.sums[warp][(g * kHalves + h) * kWarpThreads + lane] = {pair[0], pair[1]};
      }
    }
    if constexpr (Kind::kNorm == RowNorm::kAfter) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        float sum = squares[h];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (lane % 4 == 0) shared.squares[warp][h * 8 + lane / 4] = sum;
      }
    }
  }

  __device__ __forceinline__ void store_results(int first) {
    for (int index = threadIdx.x; index < num_pairs(first); index += kNumWarps * kWarpThreads) {
      const Pair pair = pair_at(index, first);
      if (!contains(pair)) continue;
      float2 z = {};
      float squares = 0.0f;
#pragma unroll
      for (int w = 0; w < kNumWarps; ++w) {
        const float2 sum = shared.sums[w][index];
        z = {z.x + sum.x, z.y + sum.y};
        if (Kind::kNorm == RowNorm::kAfter) squares += shared.squares[w][pair.token];
      }
      if constexpr (Kind::kNorm == RowNorm::kAfter) {
        const float factor = rows.inverse_root(squares);
        z = {z.x * factor, z.y * factor};
      }
      output.store(shared.extra[index], pair.row, pair.token, z);
    }
  }
};

template <typename Kind, typename Output, typename GroupAt>
__device__ __forceinline__ void run_streamed_product(
    ProductShared<Kind, typename Output::Extra>& shared, GroupRange groups, int num_rows,
    const GroupAt& group_at, const ActivationRows<typename Kind::T>& rows, const Output& output) {
  StreamedProduct<Kind, Output, GroupAt>{shared, groups, num_rows, group_at, rows, output}.run();
}

}  // namespace kernelcat
