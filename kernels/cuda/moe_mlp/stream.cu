// Both products of a layer for few tokens: weights W go once from global memory to the warps that
// multiply them, as Z^T = W A^T with 16 rows of W and 8 tokens a time.
//
// A persistent thread block has a range of the row groups of all experts, or of all their passes
// where an expert has more tokens than are multiplied at a time: every thread block has as much to
// do. It stages the activations of one pass at a time. Where tokens are few, it also routes them by
// itself, so that no launch has to come before. Weights that stream through tensor cores in the
// order of registers are Marlin's idea (Frantar et al. 2024); routing inside of the products avoids
// the launches that sort tokens.
#include <kernelcat/gating.cuh>
#include <kernelcat/pdl.cuh>

#include "router.cuh"
#include "staged_rows.cuh"
#include "team_sum.cuh"
#include "weight_ring.cuh"

namespace kernelcat {

constexpr int kNumWarps = 16;

template <typename Unit_, bool kSecond_, Gating kGating_, int kColTiles_, int kRowTiles_,
          int kTeamWarps, int kDepth>
struct StreamKind {
  using Unit = Unit_;
  using T = typename Unit::T;
  static constexpr bool kSecond = kSecond_;  // whether this is the second product
  static constexpr Gating kGating = kGating_;
  static constexpr int kColTiles = kColTiles_, kRowTiles = kRowTiles_;
  using Ring = RingKind<Unit, kRowTiles, kTeamWarps, kDepth, kNumWarps>;
  using Rows = StagedRows<Unit, kColTiles>;
  using Sum = TeamSum<kRowTiles, kColTiles, kTeamWarps>;
  using Accumulators = float[kRowTiles][kColTiles][4];
};

// What becomes of the sums: rows of h, or of y = h @ W2^T + bias2 in float32.
template <typename Kind>
struct StreamOutput {
  using T = typename Kind::T;

  void* result;               // h (assignments, n / 2), or y (assignments, n)
  const T* bias;              // (experts, n), or null
  const float* global_scale;  // (experts,), or null
  int n;

  __device__ __forceinline__ float factor(int expert) const {
    return Kind::Unit::kNvfp4 ? global_scale[expert] * Kind::Unit::kGrowth : Kind::Unit::kGrowth;
  }

  // Stores rows `row` to `row` + 3 of Z^T in the column of `assignment`.
  __device__ __forceinline__ void store(const float4& sums, float factor, int expert, int row,
                                        int64_t assignment) const {
    if (row >= n) return;
    float z[4] = {sums.x * factor, sums.y * factor, sums.z * factor, sums.w * factor};
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        z[i] += to_float(bias[static_cast<int64_t>(expert) * n + row + i]);
    }
    if constexpr (Kind::kSecond) {
      float* y = static_cast<float*>(result) + assignment * n + row;
      *reinterpret_cast<float4*>(y) = {z[0], z[1], z[2], z[3]};
    } else {
      T* h = static_cast<T*>(result) + (assignment * n + row) / 2;
      *reinterpret_cast<uint32_t*>(h) =
          pack<T>(gated<Kind::kGating>(z[0], z[1]), gated<Kind::kGating>(z[2], z[3]));
    }
  }
};

// Adds `products`, which have common scales, to the sums, and clears them.
template <typename Kind, int kStep>
__device__ __forceinline__ void promote(typename Kind::Accumulators& sums,
                                        typename Kind::Accumulators& products,
                                        const typename Kind::Unit (&units)[Kind::kRowTiles],
                                        const float* a_scales) {
#pragma unroll
  for (int i = 0; i < Kind::kRowTiles; ++i) {
    const RowScales scales = units[i].template row_scales<kStep>();
#pragma unroll
    for (int j = 0; j < Kind::kColTiles; ++j) {
      float2 a_scale = {1.0f, 1.0f};
      if constexpr (Kind::Unit::kFp8Products) {
        a_scale = *reinterpret_cast<const float2*>(a_scales + j * 8 + lane_index() % 4 * 2);
      }
      sums[i][j][0] += products[i][j][0] * (scales.upper * a_scale.x);
      sums[i][j][1] += products[i][j][1] * (scales.upper * a_scale.y);
      sums[i][j][2] += products[i][j][2] * (scales.lower * a_scale.x);
      sums[i][j][3] += products[i][j][3] * (scales.lower * a_scale.y);
#pragma unroll
      for (int v = 0; v < 4; ++v) products[i][j][v] = 0.0f;
    }
  }
}

// Adds the products of one unit, from step kStep on. `b` is this lane's address of the unit's first
// chunk; `operands` are those of the step before, of which two steps have one chunk.
template <typename Kind, int kStep>
__device__ __forceinline__ void multiply_steps(typename Kind::Accumulators& sums,
                                               typename Kind::Accumulators& products,
                                               const typename Kind::Unit (&units)[Kind::kRowTiles],
                                               uint4 (&operands)[Kind::kColTiles], const uint8_t* b,
                                               int tile_bytes, const float* a_scales) {
  using Unit = typename Kind::Unit;
  constexpr int kScaled = Unit::kScaledSteps;
  if constexpr (kStep < Unit::kSteps) {
    if constexpr (kStep % 2 == 0) {
#pragma unroll
      for (int j = 0; j < Kind::kColTiles; ++j) {
        operands[j] = *reinterpret_cast<const uint4*>(b + j * tile_bytes + kStep / 2 * kChunkBytes);
      }
    }
#pragma unroll
    for (int i = 0; i < Kind::kRowTiles; ++i) {
      uint32_t a[4];
      units[i].template operand<kStep>(a);
#pragma unroll
      for (int j = 0; j < Kind::kColTiles; ++j) {
        const uint4& four = operands[j];
        const uint2 two = kStep % 2 == 0 ? uint2{four.x, four.y} : uint2{four.z, four.w};
        Unit::multiply(kScaled > 0 ? products[i][j] : sums[i][j], a, two);
      }
    }
    if constexpr (Unit::is_last_of_scale(kStep)) {
      promote<Kind, kStep>(sums, products, units, a_scales);
    }
    multiply_steps<Kind, kStep + 1>(sums, products, units, operands, b, tile_bytes, a_scales);
  }
}

// Multiplies the row groups of a segment that belong to the team.
template <typename Kind, typename Ring, typename Finish>
__device__ __forceinline__ void multiply_segment(Ring& ring, const Segment& segment,
                                                 const typename Kind::Rows& rows, Finish finish) {
  using Unit = typename Kind::Unit;
  const int tile_bytes = rows.num_chunks * kChunkBytes;
  for (int group = segment.begin + ring.team; group < segment.end; group += Kind::Ring::kNumTeams) {
    typename Kind::Accumulators sums = {}, products = {};
    for (int unit = ring.rank; unit < ring.num_units; unit += Kind::Ring::kTeamWarps) {
      Unit units[Kind::kRowTiles];
      ring.load(units);
      uint4 operands[Kind::kColTiles];
      const uint8_t* b = rows.chunks + unit * Kind::Rows::kUnitChunks * kChunkBytes;
      multiply_steps<Kind, 0>(sums, products, units, operands, b + lane_index() * 16, tile_bytes,
                              rows.scales + unit * Kind::Rows::kCols);
      ring.copy_next();
    }
    finish(group, sums);
  }
}

// Fills `ids` (tokens, top_k) in shared memory: by routing, or with `global_ids` that an earlier
// launch left. The first product's first thread block also stores what it has selected.
template <bool kRoutes, bool kStores, typename RouterKind>
__device__ __forceinline__ void find_experts(const Router<RouterKind>& router, int* ids,
                                             float* scratch, int* global_ids, float* gates,
                                             int tokens) {
  const int top_k = router.top_k;
  if constexpr (kRoutes) {
    const int warp = warp_index();
    for (int token = warp; token < tokens; token += kNumWarps) {
      const Choice choice = router.select(token, scratch + warp * router.experts);
      if (lane_index() < top_k) ids[token * top_k + lane_index()] = choice.expert;
      if (kStores && blockIdx.x == 0) store_choice(choice, token, top_k, global_ids, gates);
    }
  } else {
    for (int i = threadIdx.x; i < tokens * top_k; i += blockDim.x) ids[i] = global_ids[i];
  }
}

// `rows_bytes` is the shared memory of staged rows, and of ids and scores before.
template <typename T, typename A, WeightFormat kFormat, Gating kGating, bool kSecond, bool kRoutes,
          typename Logit, Score kScore, bool kRenormalize, bool kGrouped, int kPerLane, int kVector,
          int kColTiles, int kRowTiles, int kTeamWarps, int kDepth>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads, 1)
    moe_mlp_stream(const T* a,                 // x (tokens, k), or h (tokens * top_k, k)
                   const uint8_t* w,           // (experts, n, k) in kFormat
                   const uint8_t* w_scale,     // (experts, ...), or null
                   const float* global_scale,  // (experts,), or null
                   const T* bias,              // (experts, n), or null
                   void* result,         // h (tokens * top_k, n / 2) of T, or y (tokens * top_k, n)
                   const Logit* logits,  // (tokens, experts)
                   const float* correction,  // (experts,), or null
                   int* ids,                 // (tokens, top_k)
                   float* gates,             // (tokens, top_k)
                   int tokens, int experts, int top_k, int group_size, int top_groups,
                   float scaling, int n, int k, int rows_bytes) {
  using Unit = WeightUnit<T, A, kFormat>;
  using Kind = StreamKind<Unit, kSecond, kGating, kColTiles, kRowTiles, kTeamWarps, kDepth>;
  using Rows = typename Kind::Rows;
  using Routes = RouterKind<Logit, kScore, kRenormalize, kGrouped, kPerLane, kVector>;
  extern __shared__ uint8_t dynamic_shared[];
  const int warp = warp_index(), team = warp / kTeamWarps, rank = warp % kTeamWarps;
  const int assignments = tokens * top_k, num_units = ceil_div(k, Unit::kCols);

  // Shared memory: staged rows (before: ids and the router's scores), rings, sums, lists.
  const Rows rows = {.chunks = dynamic_shared,
                     .scales = reinterpret_cast<float*>(
                         dynamic_shared + num_units * Rows::kUnitChunks * kColTiles * kChunkBytes),
                     .num_chunks = num_units * Rows::kUnitChunks,
                     .k = k};
  int* shared_ids = reinterpret_cast<int*>(dynamic_shared);
  float* scratch = reinterpret_cast<float*>(shared_ids + assignments);
  uint8_t* rings = dynamic_shared + rows_bytes;
  float* sums = reinterpret_cast<float*>(rings + kNumWarps * Kind::Ring::kWarpBytes);
  const typename Kind::Sum sum = {sums + warp / kTeamWarps * kTeamWarps * Kind::Sum::kWarpFloats,
                                  team, rank};
  using Parts = Segments<kColTiles * 8>;
  const auto lists = ExpertLists<kColTiles * 8>::at(
      reinterpret_cast<int*>(sums + kNumWarps * Kind::Sum::kWarpFloats), assignments, experts);

  // The launch before the second product is the first product, which began after all launches
  // before it had ended: only h has to be waited for.
  if constexpr (!kSecond) grid_dependency_wait();
  launch_dependents();
  const Router<Routes> router = {logits,     correction, experts, top_k,
                                 group_size, top_groups, scaling};
  find_experts<kRoutes, !kSecond>(router, shared_ids, scratch, ids, gates, tokens);
  lists.build(shared_ids, assignments, experts);

  const int num_groups = ceil_div(n, Unit::kRows * kRowTiles);
  const int64_t num_items = static_cast<int64_t>(*lists.num_passes) * num_groups;
  const Parts parts = {.lists = lists,
                       .num_groups = num_groups,
                       .first = static_cast<int>(num_items * blockIdx.x / gridDim.x),
                       .last = static_cast<int>(num_items * (blockIdx.x + 1) / gridDim.x)};
  WeightRing<typename Kind::Ring, Parts> ring = {
      .source = {.w = w, .scale = w_scale, .n = n, .k = k},
      .segments = parts,
      .ring = rings + warp * Kind::Ring::kWarpBytes,
      .rank = rank,
      .team = team,
      .num_units = num_units};
  ring.start();
  if constexpr (kSecond) grid_dependency_wait();

  const StreamOutput<Kind> output = {result, bias, global_scale, n};
  for (Segment segment = parts.front(); parts.contains(segment); segment = parts.after(segment)) {
    const int* assigned = parts.assignments(segment);
    const int num_cols = parts.num_cols(segment), expert = parts.expert(segment);
    __syncthreads();  // rows of the segment before have been read
    rows.stage(a, assigned, num_cols, [&](int row) { return kSecond ? row : row / top_k; });
    __syncthreads();
    const float factor = output.factor(expert);
    using Accumulators = typename Kind::Accumulators;
    multiply_segment<Kind>(ring, segment, rows, [&](int group, const Accumulators& accumulators) {
      sum.add_up(accumulators, num_cols, [&](const float4& four, int row, int col) {
        const int first_row = group * kRowTiles * Unit::kRows;
        output.store(four, factor, expert, first_row + row, assigned[col]);
      });
    });
  }
}

}  // namespace kernelcat
