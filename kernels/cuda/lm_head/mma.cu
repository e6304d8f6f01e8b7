// The largest logits in one launch: warps stream tiles of 16 rows of w from global memory straight
// into the registers of mma, and hold the first tokens of each row of x in lists. Each thread block
// merges the lists of its warps, and the last thread block merges the lists of all thread blocks.
//
// mma may sum over k in any order that is the same for both operands. A lane therefore loads 16
// bytes, eight neighbouring columns of a row of w or of x: four columns for each of two mmas.
#include <kernelcat/float32.cuh>
#include <kernelcat/mma.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/prefetch.cuh>
#include <kernelcat/top_list.cuh>

namespace kernelcat {

constexpr int kMaxTopK = 16;
constexpr int kTileRows = 16;       // of w
constexpr int kVector = 8;          // elements in 16 bytes
constexpr int kChunkVectors = 4;    // vectors of a row that a warp loads at once: one a lane
constexpr int kResidentWarps = 16;  // of an SM: 128 registers a thread
constexpr int kBatch = 8;           // tokens of other thread blocks that a lane loads at once

template <typename T, int kTokens>
struct HeadProduct {
  const uint4* w;         // (vocab, row_vectors) vectors
  const uint4* shared_x;  // (kTokens, pitch) vectors in shared memory
  int vocab, row_vectors, num_chunks, pitch;

  // sums[n] of lane 4 g + q: rows g and g + 8 of the tile times rows 8 n + 2 q and 8 n + 2 q + 1 of
  // x, as mma leaves them. Instead of rows beyond the vocabulary the last row is read.
  template <int kUnroll>
  __device__ __forceinline__ void multiply(float (&sums)[kTokens / 8][4], int tile) const {
    const int group = lane_index() / 4, quad = lane_index() % 4;
    const uint4* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = min(tile * kTileRows + half * 8 + group, vocab - 1);
      rows[half] = w + row * row_vectors + quad;
    }
    for (int first = 0; first < num_chunks; first += kUnroll) {
      uint4 loaded[kUnroll][2];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int vector = (first + i) * kChunkVectors;
        const bool is_inside = vector + quad < row_vectors;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          loaded[i][half] = is_inside ? __ldcs(rows[half] + vector) : uint4{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (first + i >= num_chunks) break;
        const uint4 &upper = loaded[i][0], &lower = loaded[i][1];
        const uint32_t a[2][4] = {{upper.x, lower.x, upper.y, lower.y},
                                  {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
          const uint4 b = shared_x[(n * 8 + group) * pitch + (first + i) * kChunkVectors + quad];
          mma_16x8x16<T>(sums[n], a[0], b.x, b.y);
          mma_16x8x16<T>(sums[n], a[1], b.z, b.w);
        }
      }
    }
  }
};

// Copies x (tokens, row_vectors) to shared memory, with zeros beyond its rows and columns.
template <int kTokens>
__device__ __forceinline__ void copy_x(uint4* shared_x, const uint4* x, int tokens, int row_vectors,
                                       int pitch) {
  for (int i = threadIdx.x; i < kTokens * pitch; i += blockDim.x) {
    const int token = i / pitch, col = i % pitch;
    const bool is_inside = token < tokens && col < row_vectors;
    shared_x[i] = is_inside ? x[int64_t{token} * row_vectors + col] : uint4{0, 0, 0, 0};
  }
}

// Brings the rows of a tile into L2.
__device__ __forceinline__ void prefetch_tile(const uint4* w, int tile, int vocab,
                                              int row_vectors) {
  constexpr int kLineVectors = 8;
  const int64_t begin = int64_t{tile} * kTileRows * row_vectors;
  const int64_t end = min(begin + kTileRows * row_vectors, int64_t{vocab} * row_vectors);
  for (int64_t i = begin + lane_index() * kLineVectors; i < end; i += kWarpThreads * kLineVectors) {
    prefetch_l2(w + i);
  }
}

// Offers a tile's logits to the lists, and stores them where `logits` is not null.
template <int kTokens, typename Logit>
__device__ __forceinline__ void take_tile(TopList (&lists)[kTokens],
                                          const float (&sums)[kTokens / 8][4], Logit* logits,
                                          int tile, int tokens, int vocab, int top_k) {
  const int first_row = tile * kTileRows + lane_index() / 4, quad = lane_index() % 4;
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if (token >= tokens) break;
    const bool is_owner = token % 8 / 2 == quad;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8;
      ScoredToken candidate;
      if (is_owner && row < vocab) {
        candidate = {sums[token / 8][half * 2 + token % 2], row};
        if (logits != nullptr) {
          logits[int64_t{token} * vocab + row] = from_float<Logit>(candidate.score);
        }
      }
      lists[token].offer(candidate, top_k);
    }
  }
}

// Whether this thread block is the last of gridDim.x to arrive, in all threads; what the other
// thread blocks wrote before they arrived is then visible. `*counter` is zero before and after.
__device__ __forceinline__ bool arrive_last(uint32_t* counter) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1u) + 1 == gridDim.x;
    if (is_last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Merges the lists of the warps of this thread block, and stores the result in `found`, the place
// of this thread block. `shared_lists` is where x was.
template <int kWarps, int kTokens>
__device__ __forceinline__ void merge_warps(const TopList (&lists)[kTokens],
                                            ScoredToken (&shared_lists)[kWarps][kTokens][kMaxTopK],
                                            ScoredToken* found, int tokens, int top_k) {
  const int warp = threadIdx.x / kWarpThreads, lane = lane_index();
  __syncthreads();  // all warps have read x
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if (lane < kMaxTopK) shared_lists[warp][token][lane] = lists[token].token;
  }
  __syncthreads();
  for (int token = warp; token < tokens; token += kWarps) {
    TopList list;
    for (int first = 0; first < kWarps * top_k; first += kWarpThreads) {
      const int i = first + lane;
      ScoredToken candidate;
      if (i < kWarps * top_k) candidate = shared_lists[i / top_k][token][i % top_k];
      list.offer(candidate, top_k);
    }
    if (lane < top_k) found[token * kMaxTopK + lane] = list.token;
  }
}

// Merges what the thread blocks found for one row of x: `found` is that of the first thread block,
// and the others follow at a distance of kTokens * kMaxTopK.
template <int kTokens>
__device__ __forceinline__ TopList merge_blocks(const ScoredToken* found, int top_k) {
  const int count = gridDim.x * top_k;
  TopList list;
  for (int first = lane_index(); first < ceil_div(count, kWarpThreads) * kWarpThreads;
       first += kBatch * kWarpThreads) {
    ScoredToken candidates[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kWarpThreads;
      if (i >= count) continue;
      const int64_t place = int64_t{i / top_k} * (kTokens * kMaxTopK) + i % top_k;
      const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(found) + place);
      candidates[j] = __builtin_bit_cast(ScoredToken, bits);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) list.offer(candidates[j], top_k);
  }
  return list;
}

// blockIdx.y is a group of kTokens rows of x; the thread blocks of a group share the rows of w.
template <typename T, typename Logit, int kTokens, int kWarps, int kUnroll, bool kDependentLaunch>
__global__ void __launch_bounds__(kWarps* kWarpThreads, kResidentWarps / kWarps)
    lm_head_mma(const T* x,          // (num_tokens, hidden)
                const T* w,          // (vocab, hidden)
                float* values,       // (num_tokens, top_k)
                int* ids,            // (num_tokens, top_k)
                Logit* logits,       // (num_tokens, vocab) or null
                ScoredToken* found,  // (groups, thread blocks of a group, kTokens, kMaxTopK)
                uint32_t* counters,  // (groups,), zeros
                int num_tokens, int vocab, int hidden, int top_k) {
  extern __shared__ uint4 dynamic_shared[];
  const int warp = threadIdx.x / kWarpThreads, lane = lane_index();
  const int row_vectors = hidden / kVector, num_chunks = ceil_div(row_vectors, kChunkVectors);
  const int pitch = (num_chunks | 1) * kChunkVectors;  // odd: rows begin at different banks
  const int num_tiles = ceil_div(vocab, kTileRows);
  const int first_tile = blockIdx.x * kWarps + warp, step = gridDim.x * kWarps;
  const int64_t first_token = int64_t{blockIdx.y} * kTokens;
  const int tokens = min(kTokens, static_cast<int>(num_tokens - first_token));
  const uint4* w_vectors = reinterpret_cast<const uint4*>(w);
  const uint4* x_vectors = reinterpret_cast<const uint4*>(x) + first_token * row_vectors;
  if (logits != nullptr) logits += first_token * vocab;
  found += int64_t{blockIdx.y} * gridDim.x * (kTokens * kMaxTopK);

  if constexpr (kDependentLaunch) {
    if (first_tile < num_tiles) prefetch_tile(w_vectors, first_tile, vocab, row_vectors);
    grid_dependency_wait();
  }
  copy_x<kTokens>(dynamic_shared, x_vectors, tokens, row_vectors, pitch);
  __syncthreads();
  TopList lists[kTokens];
  const HeadProduct<T, kTokens> product{w_vectors,   dynamic_shared, vocab,
                                        row_vectors, num_chunks,     pitch};
  for (int tile = first_tile; tile < num_tiles; tile += step) {
    float sums[kTokens / 8][4] = {};
    product.template multiply<kUnroll>(sums, tile);
    take_tile<kTokens>(lists, sums, logits, tile, tokens, vocab, top_k);
  }
  if constexpr (kDependentLaunch) launch_dependents();

  merge_warps<kWarps, kTokens>(
      lists, *reinterpret_cast<ScoredToken(*)[kWarps][kTokens][kMaxTopK]>(dynamic_shared),
      found + blockIdx.x * (kTokens * kMaxTopK), tokens, top_k);
  if (!arrive_last(counters + blockIdx.y)) return;
  for (int token = warp; token < tokens; token += kWarps) {
    const TopList list = merge_blocks<kTokens>(found + token * kMaxTopK, top_k);
    if (lane >= top_k) continue;
    values[(first_token + token) * top_k + lane] = list.token.score;
    ids[(first_token + token) * top_k + lane] = list.token.id;
  }
}

}  // namespace kernelcat
