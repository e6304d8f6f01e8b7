// Swizzled scales: tiles of 128 x 4, stored through shared memory. In a tile the scales of rows r,
// r + 32, r + 64 and r + 96 are adjacent, 16 bytes; so a thread block has 32 rows of a tile, the
// same eight of each quarter, and stores whole units of 16 bytes. Scales outside the matrix are
// zeros.
#include "vector.cuh"

namespace kernelcat {

// A thread block has 512 columns; a warp has kUnroll rows in flight.
template <typename T, bool kNvfp4, bool kRotated, bool kStochastic, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads, kStochastic ? 1 : 640 / kThreads)
    nvfp4_quantize_swizzled(const T* x,                 // (m, k)
                            const float* global_scale,  // (1,), not read for MXFP4
                            const T* weight,            // (k,), not read
                            const float* signs,         // (16,), read with kRotated
                            const uint32_t* seed,       // (2,), read with kStochastic
                            uint2* q,                   // (m, k / 16) vectors of 16 codes
                            uint8_t* scale,             // (m, k / 16 or 32), padded
                            int m, int k) {
  constexpr int kLanes = kScaleLanes<kNvfp4>, kWarps = kThreads / kWarpThreads;
  constexpr int kRows = 32, kQuarterRows = kRows / 4;
  constexpr int kTiles = kWarpThreads / kLanes / 4;  // tiles side by side, of a thread block
  __shared__ alignas(16) uint8_t shared[kTiles][kQuarterRows][16];
  const Options<kRotated, kStochastic> options(signs, seed);
  const int row_vectors = k / kVector, row_tiles = ceil_div(k / kFp4Block<kNvfp4>, 4);
  const int num_block_cols = ceil_div(row_vectors, kWarpThreads);
  const int block_col = blockIdx.x % num_block_cols, block_row = blockIdx.x / num_block_cols;
  const int col = block_col * kWarpThreads + lane_index();
  const int tile_row = block_row / 4, part = block_row % 4;  // which eight rows of each quarter
  const QuickScaling<kNvfp4, kRotated, kStochastic> scaling(global_scale);

#pragma unroll 1
  for (int first = threadIdx.x / kWarpThreads; first < kRows; first += kUnroll * kWarps) {
    const auto row = [&](int i) {
      const int local_row = first + i * kWarps;
      return tile_row * 128 + local_row / kQuarterRows * 32 + part * kQuarterRows +
             local_row % kQuarterRows;
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
      const QuantizedVector found = quantize_vector<T>(options, scaling, vectors[i], index(i));
      if (is_inside(i)) __stcs(q + index(i), found.codes);
      if (lane_index() % kLanes == 0) {
        const int local_row = first + i * kWarps, scale_col = lane_index() / kLanes;
        shared[scale_col / 4][local_row % kQuarterRows]
              [local_row / kQuarterRows * 4 + scale_col % 4] = is_inside(i) ? found.scale : 0;
      }
    }
  }
  __syncthreads();
  const int first_tile = block_col * kTiles, num_tiles = min(row_tiles - first_tile, kTiles);
  for (int i = threadIdx.x; i < num_tiles * kQuarterRows; i += kThreads) {
    const int tile = i / kQuarterRows, row = i % kQuarterRows;
    const int64_t tile_idx = static_cast<int64_t>(tile_row) * row_tiles + first_tile + tile;
    reinterpret_cast<uint4*>(scale)[tile_idx * 32 + part * kQuarterRows + row] =
        *reinterpret_cast<const uint4*>(shared[tile][row]);
  }
}

}  // namespace kernelcat
