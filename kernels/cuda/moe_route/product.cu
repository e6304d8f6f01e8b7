// The router's product and routing in one launch, for up to 512 tokens.
//
// Thread blocks compute partial logits: a tile of 16 tokens, all experts, one split of hidden. The
// last thread block of a tile to arrive adds up the partial logits and selects experts. The last
// tile's thread block makes the maps of all tokens.
#include <kernelcat/mma.cuh>
#include <kernelcat/pdl.cuh>

#include "select_block.cuh"

namespace kernelcat {

constexpr int kTileTokens = 16, kMaxTokens = 512;
constexpr int kMmaExperts = 8;     // columns of one mma
constexpr int kStepElements = 32;  // elements of hidden that two mma take: 8 of each lane of a row

// Setup for the selection from summed logits.
template <Score kScore, bool kRenormalize, bool kGrouped, int kPerLane, int kVector, int kWarps>
using ProductSetup = Setup<float32, kScore, kRenormalize, kGrouped, false, kPerLane, kVector,
                           kWarps, kTileTokens, 1>;

// Partial logits of a tile: the warp computes experts 8 * (warp + i * warps) + 0 ... 7. An mma
// needs elements in an order of its own, but any order serves if rows of x and of the router have
// the same: lane l loads 8 elements at once, of row l / 4, and uses four of them in each of two
// mma.
template <typename T, int kWarps, int kMmas>
struct PartialProduct {
  float sums[kMmas][4] = {};

  // Adds up elements begin ... end - 1 of hidden. Rows of x beyond num_tokens count as 0; `x`
  // points to the tile's first row. hidden, begin and end are multiples of 8.
  __device__ __forceinline__ void run(const T* x, const T* router, int num_tokens, int experts,
                                      int hidden, int begin, int end) {
    const int row = lane_index() / 4, warp = warp_index();
#pragma unroll 2
    for (int step = begin; step < end; step += kStepElements) {
      const int k = step + lane_index() % 4 * 8;
      const bool is_inside = k < end;
      const auto load = [&](const T* rows, int index, int count) {
        if (!is_inside || index >= count) return uint4{0, 0, 0, 0};
        return __ldg(
            reinterpret_cast<const uint4*>(rows + static_cast<int64_t>(index) * hidden + k));
      };
      const uint4 low = load(x, row, num_tokens), high = load(x, row + 8, num_tokens);
      uint4 columns[kMmas];
#pragma unroll
      for (int i = 0; i < kMmas; ++i) {
        columns[i] = load(router, kMmaExperts * (warp + i * kWarps) + row, experts);
      }
      const uint32_t first[4] = {low.x, high.x, low.y, high.y};
      const uint32_t second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int i = 0; i < kMmas; ++i) {
        mma_16x8x16<T>(sums[i], first, columns[i].x, columns[i].y);
        mma_16x8x16<T>(sums[i], second, columns[i].z, columns[i].w);
      }
    }
  }

  // Stores the sums; `partial` is (kTileTokens, max_experts).
  __device__ __forceinline__ void store(float* partial, int max_experts) const {
    const int warp = warp_index();
#pragma unroll
    for (int i = 0; i < kMmas; ++i) {
      const int expert = kMmaExperts * (warp + i * kWarps) + lane_index() % 4 * 2;
      if (expert >= max_experts) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* row = partial + (lane_index() / 4 + 8 * half) * max_experts + expert;
        __stcg(reinterpret_cast<float2*>(row), float2{sums[i][2 * half], sums[i][2 * half + 1]});
      }
    }
  }
};

// Counts this thread block; true in the thread block that arrives last, which then sees what the
// others stored before. `counter` is zero before and after; `is_last` is in shared memory.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, int num_arrivals, int* is_last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = atomicAdd(counter, 1u) + 1 == num_arrivals;
    if (*is_last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return *is_last;
}

// The maps of all tokens, from their expert_ids, by one thread block.
template <typename Setup>
__device__ __forceinline__ void make_maps(const Routed& out, int tokens, int experts, int top_k,
                                          int capacity) {
  constexpr int kMaxExperts = Setup::kMaxExperts;
  __shared__ TokenMasks<kMaxTokens, kMaxExperts> masks;
  __shared__ ExpertCounts<kMaxExperts> sums;
  masks.clear();
  __syncthreads();
  for (int slot = threadIdx.x; slot < tokens * top_k; slot += Setup::kThreads) {
    masks.add(slot / top_k, __ldcg(out.expert_ids + slot));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < kMaxExperts; e += Setup::kThreads) {
    sums.totals[e] = masks.count(e);
    sums.earlier[e] = 0;
  }
  __syncthreads();
  if (warp_index() == 0) sums.scan(experts, capacity);
  __syncthreads();
  sums.store(out, experts, capacity);
  for (int slot = threadIdx.x; slot < tokens * top_k; slot += Setup::kThreads) {
    const int expert = __ldcg(out.expert_ids + slot);
    sums.place(out, slot, expert, masks.rank(slot / top_k, expert), capacity);
  }
}

template <typename T, typename Setup>
__global__ void __launch_bounds__(Setup::kThreads)
    moe_route_product(const T* x,               // (tokens, hidden)
                      const T* router,          // (experts, hidden)
                      const T* router_bias,     // (experts,) or null
                      const float* correction,  // (experts,) or null
                      int* expert_ids,          // (tokens, top_k)
                      float* weights,           // (tokens, top_k)
                      int* counts,              // (experts,)
                      int* offsets,             // (experts + 1,)
                      int* order,               // (tokens * top_k,)
                      int* position,            // (tokens, top_k)
                      int* load,                // (experts,) or null
                      float* all_logits,        // (tokens, experts)
                      float* partials,          // (tiles, splits, kTileTokens, kMaxExperts)
                      uint32_t* counters,       // (tiles + 1,), zero before and after
                      int tokens, int experts, int top_k, int group_size, int top_groups,
                      float scaling, int capacity, int hidden, int num_splits) {
  constexpr int kMaxExperts = Setup::kMaxExperts, kWarps = Setup::kWarps;
  constexpr int kMmas = ceil_div(kMaxExperts, kMmaExperts * kWarps);
  constexpr int kPartial = kTileTokens * kMaxExperts;
  __shared__ Selection<Setup> selection;
  __shared__ int is_last;
  const int tile = blockIdx.x / num_splits, split = blockIdx.x % num_splits;
  const int num_tiles = gridDim.x / num_splits;
  const auto block = TokenBlock<Setup>::of(all_logits, correction, tile, tokens, experts, top_k,
                                           group_size, top_groups, scaling);
  const Routed out = {expert_ids, weights, counts, offsets, order, position, load};
  const int split_elements = ceil_div(ceil_div(hidden, num_splits), kStepElements) * kStepElements;
  const int begin = split * split_elements, end = min(begin + split_elements, hidden);
  grid_dependency_wait();

  PartialProduct<T, kWarps, kMmas> product;
  product.run(x + static_cast<int64_t>(block.first_token) * hidden, router, block.num_tokens,
              experts, hidden, begin, end);
  product.store(partials + static_cast<int64_t>(blockIdx.x) * kPartial, kMaxExperts);
  if (!arrive_last(counters + 1 + tile, num_splits, &is_last)) return;

  const float* tile_partials = partials + static_cast<int64_t>(tile) * num_splits * kPartial;
  for (int i = threadIdx.x; i < block.num_tokens * experts; i += Setup::kThreads) {
    const int token = i / experts, expert = i % experts;
    float logit = 0.0f;
    for (int s = 0; s < num_splits; ++s) {
      logit += __ldcg(tile_partials + s * kPartial + token * kMaxExperts + expert);
    }
    if (router_bias) logit += to_float(router_bias[expert]);
    all_logits[static_cast<int64_t>(block.first_token) * experts + i] = logit;
  }
  __syncthreads();
  select_block(selection, block, out);
  if (!arrive_last(counters, num_tiles, &is_last)) return;
  make_maps<Setup>(out, tokens, experts, top_k, capacity);
}

}  // namespace kernelcat
