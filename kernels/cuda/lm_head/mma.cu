// The largest logits in one launch: warps stream tiles of 16 rows of w from global memory straight
// into the registers of mma, and keep the first tokens of each row of x in lists. The lists of a
// thread block, and then those of all thread blocks, are merged.
//
// mma sums over k in any order, as long as both operands agree. A lane therefore loads 16 bytes,
// eight neighbouring columns of a row of w and of x, and gives four of them to each of two mmas.
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
      ScoredToken offered;
      if (is_owner && row < vocab) {
        offered = {sums[token / 8][half * 2 + token % 2], row};
        if (logits != nullptr) {
          logits[int64_t{token} * vocab + row] = from_float<Logit>(offered.score);
        }
      }
      lists[token].offer(offered, top_k);
    }
  }
}

// Whether this thread block is the last one to arrive, in all threads; what the others wrote before
// is then visible. `*counter` is zero before and after.
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

template <typename T, typename Logit, int kTokens, int kWarps, int kUnroll, bool kDependentLaunch>
__global__ void __launch_bounds__(kWarps* kWarpThreads, kResidentWarps / kWarps)
    lm_head_mma(const T* x,          // (tokens, hidden)
                const T* w,          // (vocab, hidden)
                float* values,       // (tokens, top_k)
                int* ids,            // (tokens, top_k)
                Logit* logits,       // (tokens, vocab) or null
                ScoredToken* found,  // (thread blocks, kTokens, kMaxTopK)
                uint32_t* counter,   // zero
                int tokens, int vocab, int hidden, int top_k) {
  extern __shared__ uint4 dynamic_shared[];
  const int warp = threadIdx.x / kWarpThreads, lane = lane_index();
  const int row_vectors = hidden / kVector, num_chunks = ceil_div(row_vectors, kChunkVectors);
  const int pitch = (num_chunks | 1) * kChunkVectors;  // odd: rows begin at different banks
  const int num_tiles = ceil_div(vocab, kTileRows);
  const int first_tile = blockIdx.x * kWarps + warp, step = gridDim.x * kWarps;
  const uint4* vectors = reinterpret_cast<const uint4*>(w);

  if constexpr (kDependentLaunch) {
    if (first_tile < num_tiles) prefetch_tile(vectors, first_tile, vocab, row_vectors);
    grid_dependency_wait();
  }
  copy_x<kTokens>(dynamic_shared, reinterpret_cast<const uint4*>(x), tokens, row_vectors, pitch);
  __syncthreads();
  TopList lists[kTokens];
  const HeadProduct<T, kTokens> product{vectors,     dynamic_shared, vocab,
                                        row_vectors, num_chunks,     pitch};
  for (int tile = first_tile; tile < num_tiles; tile += step) {
    float sums[kTokens / 8][4] = {};
    product.template multiply<kUnroll>(sums, tile);
    take_tile<kTokens>(lists, sums, logits, tile, tokens, vocab, top_k);
  }
  if constexpr (kDependentLaunch) launch_dependents();

  // The lists of the warps, then those of the thread blocks, each token's by one warp.
  auto& shared_lists = *reinterpret_cast<ScoredToken(*)[kWarps][kTokens][kMaxTopK]>(dynamic_shared);
  __syncthreads();  // x has been read
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if (lane < kMaxTopK) shared_lists[warp][token][lane] = lists[token].token;
  }
  __syncthreads();
  for (int token = warp; token < tokens; token += kWarps) {
    TopList list;
    for (int first = 0; first < kWarps * top_k; first += kWarpThreads) {
      const int i = first + lane;
      ScoredToken offered;
      if (i < kWarps * top_k) offered = shared_lists[i / top_k][token][i % top_k];
      list.offer(offered, top_k);
    }
    const int64_t place = (int64_t{blockIdx.x} * kTokens + token) * kMaxTopK + lane;
    if (lane < top_k) found[place] = list.token;
  }
  if (!arrive_last(counter)) return;
  const int num_found = gridDim.x * top_k;
  for (int token = warp; token < tokens; token += kWarps) {
    TopList list;
    for (int first = 0; first < num_found; first += kBatch * kWarpThreads) {
      ScoredToken offered[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kWarpThreads + lane;
        if (i >= num_found) continue;
        const int64_t place = (int64_t{i / top_k} * kTokens + token) * kMaxTopK + i % top_k;
        const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(found) + place);
        offered[j] = __builtin_bit_cast(ScoredToken, bits);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) list.offer(offered[j], top_k);
    }
    if (lane >= top_k) continue;
    values[token * top_k + lane] = list.token.score;
    ids[token * top_k + lane] = list.token.id;
  }
}

}  // namespace kernelcat
