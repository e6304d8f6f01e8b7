// Scales in tiles of 128 x 4, of which a thread block has 32 rows: eight of each quarter, for those
// lie together. They go through shared memory. Padding is zeros, as what lies outside.
#include "vector.cuh"

namespace kernelcat {

// A thread block has 512 columns; kUnroll: rows that a warp has in flight.
template <typename T, bool kNvfp4, bool kRotated, bool kStochastic, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads, kStochastic ? 1 : 640 / kThreads)
    nvfp4_quantize_swizzled(const T* x, const float* global_scale, const T* weight,
                            const float* signs, const uint32_t* seed, uint2* q, uint8_t* scale,
                            int m, int k) {
  constexpr int kLanes = kScaleLanes<kNvfp4>, kWarps = kThreads / kWarpThreads;
  constexpr int kRows = 32, kQuarter = kRows / 4;
  constexpr int kTiles = kWarpThreads / kLanes / 4;  // beside each other, of a thread block
  __shared__ alignas(16) uint8_t shared[kTiles][kQuarter][16];
  const Options<kRotated, kStochastic> options(signs, seed);
  const int row_vectors = k / kVector, tiles_beside = ceil_div(k / kFp4Block<kNvfp4>, 4);
  const int blocks_beside = ceil_div(row_vectors, kWarpThreads);
  const int beside = blockIdx.x % blocks_beside, below = blockIdx.x / blocks_beside;
  const int col = beside * kWarpThreads + lane_index();
  const int tile_row = below / 4, part = below % 4;  // of the tiles: a quarter of each quarter
  const QuickScaling<kNvfp4, kRotated, kStochastic> scaling(global_scale);

#pragma unroll 1
  for (int first = threadIdx.x / kWarpThreads; first < kRows; first += kUnroll * kWarps) {
    const auto row = [&](int i) {
      const int own = first + i * kWarps;
      return tile_row * 128 + own / kQuarter * 32 + part * kQuarter + own % kQuarter;
    };
    const auto is_inside = [&](int i) { return row(i) < m && col < row_vectors; };
    const auto index = [&](int i) { return static_cast<int64_t>(row(i)) * row_vectors + col; };
    Vector vectors[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (is_inside(i)) vectors[i] = Vector::load_once(x, index(i));
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const Coded found = coded<T>(options, scaling, vectors[i], index(i));
      if (is_inside(i)) __stcs(q + index(i), found.codes);
      if (lane_index() % kLanes == 0) {
        const int own = first + i * kWarps, scale_col = lane_index() / kLanes;
        shared[scale_col / 4][own % kQuarter][own / kQuarter * 4 + scale_col % 4] =
            is_inside(i) ? found.scale : 0;
      }
    }
  }
  __syncthreads();
  const int first_tile = beside * kTiles, num_tiles = min(tiles_beside - first_tile, kTiles);
  for (int i = threadIdx.x; i < num_tiles * kQuarter; i += kThreads) {
    const int tile = i / kQuarter, row = i % kQuarter;
    const int64_t place = static_cast<int64_t>(tile_row) * tiles_beside + first_tile + tile;
    reinterpret_cast<uint4*>(scale)[place * 32 + part * kQuarter + row] =
        *reinterpret_cast<const uint4*>(shared[tile][row]);
  }
}

}  // namespace kernelcat
