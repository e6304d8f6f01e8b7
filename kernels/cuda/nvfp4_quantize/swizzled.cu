// Scales in tiles of 128 x 4: a thread block has 128 rows of 256 columns, so that its scales are
// whole tiles, which go through shared memory. Padding is zeros, as what lies outside.
#include "vector.cuh"

namespace kernelcat {

// kUnroll: rows that a warp has in flight.
template <typename T, bool kNvfp4, bool kRotated, bool kStochastic, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads, 1)
    nvfp4_quantize_swizzled(const T* x, const float* global_scale, const T* weight,
                            const float* signs, const uint32_t* seed, uint32_t* q, uint8_t* scale,
                            int m, int k) {
  constexpr int kLanes = kScaleLanes<kNvfp4>, kWarps = kThreads / kWarpThreads;
  constexpr int kTile = 512, kTiles = kWarpThreads / kLanes / 4;  // bytes; of a thread block
  __shared__ alignas(16) uint8_t shared[kTiles * kTile];
  const Arrays<T> arrays = {x, global_scale, weight, signs, seed, q, scale};
  const int row_vectors = k / kVector, scale_cols = k / kFp4Block<kNvfp4>;
  const int blocks_beside = ceil_div(row_vectors, kWarpThreads);
  const int beside = blockIdx.x % blocks_beside, below = blockIdx.x / blocks_beside;
  const int col = beside * kWarpThreads + lane_index();
  const uint4* all = reinterpret_cast<const uint4*>(x);
  const Scaling<kNvfp4> scaling(arrays.global_scale);

#pragma unroll 1
  for (int first = threadIdx.x / kWarpThreads; first < 128; first += kUnroll * kWarps) {
    const int live_rows = col < row_vectors ? m - below * 128 - first : 0;
    const int64_t own = (static_cast<int64_t>(below) * 128 + first) * row_vectors + col;
    const auto is_inside = [&](int i) { return i * kWarps < live_rows; };
    const auto index = [&](int i) { return own + static_cast<int64_t>(i * kWarps) * row_vectors; };
    uint4 vectors[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (is_inside(i)) vectors[i] = __ldcs(all + index(i));
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      float h[kVector];
      widen<T>(vectors[i], h);
      const Coded found = coded<kNvfp4, kRotated, kStochastic>(arrays, scaling, h, index(i));
      if (is_inside(i)) __stcs(q + index(i), found.codes);
      if (lane_index() % kLanes == 0) {
        shared[scale_place<true>(first + i * kWarps, lane_index() / kLanes, 4 * kTiles)] =
            is_inside(i) ? found.scale : 0;
      }
    }
  }
  __syncthreads();
  const int tiles_beside = ceil_div(scale_cols, 4), first_tile = beside * kTiles;
  const int num_vectors = min(tiles_beside - first_tile, kTiles) * (kTile / 16);
  uint4* tiles = reinterpret_cast<uint4*>(
      scale + (static_cast<int64_t>(below) * tiles_beside + first_tile) * kTile);
  for (int i = threadIdx.x; i < num_vectors; i += kThreads) {
    tiles[i] = reinterpret_cast<const uint4*>(shared)[i];
  }
}

}  // namespace kernelcat
