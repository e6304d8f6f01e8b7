// D = activation(A @ W^T + bias) for few rows of A, as D^T = W A^T. The bytes of W bound the time,
// so weights go straight from global memory to registers, where they are decoded to left operands.
//
// Warps of a thread block, and thread blocks of a cluster, split k, and add up their sums in shared
// memory. Weights in the order of registers, and warps that split k, are Marlin's (Frantar et al.
// 2024). New is that a persistent warp loads weights without a stage in shared memory.
#include <kernelcat/mma.cuh>
#include <kernelcat/pdl.cuh>

#include "activations.cuh"
#include "cluster_sum.cuh"
#include "weight_stream.cuh"

namespace kernelcat {

// A warp multiplies kRowTiles tile rows of W by kColTiles tiles of 8 rows of A at a time. A unit,
// the work item of a cluster, is kUnitTiles tile rows of W: kWarpRows warps of a thread block
// multiply different tile rows of the unit. The k range is split into slices, kSlices of them among
// the warps of a thread block that multiply the same tile rows, times kCluster thread blocks.
template <typename TA_, typename TOut, bool kNvfp4_, Activation kActivation, int kColTiles_,
          int kRowTiles_, int kWarpRows_, int kWarps_, int kCluster_, int kBlocksPerSm_>
struct MmaTile {
  using TA = TA_;
  using T = typename OperandType<TA>::Type;
  using Output = Fp4Output<TOut, kActivation, sizeof(TA) == 1>;
  static constexpr bool kNvfp4 = kNvfp4_;
  static constexpr int kColTiles = kColTiles_, kRowTiles = kRowTiles_, kWarpRows = kWarpRows_;
  static constexpr int kWarps = kWarps_, kCluster = kCluster_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kNumThreads = kWarps * kWarpThreads;
  static constexpr int kSlices = kWarps / kWarpRows;
  static constexpr int kUnitTiles = kRowTiles * kWarpRows;
  using Stream = WeightStream<T, kNvfp4, kRowTiles>;
  using Sum = ClusterSum<kUnitTiles, kSlices, kCluster>;
  using Accumulators = float[kRowTiles][kColTiles][4];
};

// Adds the products of step kStep of a tile column. `b` are right operands of two steps.
template <typename T, bool kNvfp4, int kStep, int kRowTiles, int kColTiles>
__device__ __forceinline__ void multiply_step(float (&sums)[kRowTiles][kColTiles][4],
                                              const uint4 (&words)[kRowTiles],
                                              const TileScales<kNvfp4> (&scales)[kRowTiles],
                                              const uint32_t (&b)[kColTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const uint32_t word = kStep == 0   ? words[i].x
                          : kStep == 1 ? words[i].y
                          : kStep == 2 ? words[i].z
                                       : words[i].w;
    uint32_t operand[4];
    decode<T, kNvfp4, kStep>(operand, word, scales[i]);
#pragma unroll
    for (int j = 0; j < kColTiles; ++j) {
      mma_16x8x16<T>(sums[i][j], operand, b[j][kStep % 2 * 2], b[j][kStep % 2 * 2 + 1]);
    }
  }
}

// Adds the products of a tile column, which has 64 columns of k. `rows` are the shared-memory
// addresses that this lane passes to ldmatrix for the thread block's first columns of A; `offset`
// is the distance from these columns to the tile column's, in bytes.
template <typename Config>
__device__ __forceinline__ void multiply_tile(
    typename Config::Accumulators& sums, const uint4 (&words)[Config::kRowTiles],
    const TileScales<Config::kNvfp4> (&scales)[Config::kRowTiles],
    const uint32_t (&rows)[Config::kColTiles], uint32_t offset) {
  using T = typename Config::T;
  constexpr bool kNvfp4 = Config::kNvfp4;
  uint32_t b[Config::kColTiles][4];
#pragma unroll
  for (int j = 0; j < Config::kColTiles; ++j) load_matrices(b[j], rows[j] + offset);
  multiply_step<T, kNvfp4, 0>(sums, words, scales, b);
  multiply_step<T, kNvfp4, 1>(sums, words, scales, b);
#pragma unroll
  for (int j = 0; j < Config::kColTiles; ++j) load_matrices(b[j], rows[j] + offset + kTileCols);
  multiply_step<T, kNvfp4, 2>(sums, words, scales, b);
  multiply_step<T, kNvfp4, 3>(sums, words, scales, b);
}

// Multiplies a warp's part of one work item. Weights of the next group are loaded into the
// registers whose weights have just been multiplied. `block_begin` is the thread block's first tile
// column.
template <typename Config>
__device__ __forceinline__ void accumulate(typename Config::Stream& stream,
                                           typename Config::Accumulators& sums,
                                           const uint32_t (&rows)[Config::kColTiles],
                                           int block_begin) {
  using Scales = typename Config::Stream::Scales;
  for (int first = stream.begin; first < stream.padded_end; first += kGroup) {
    stream.advance();
    Scales decoded[Config::kRowTiles];
#pragma unroll
    for (int i = 0; i < Config::kRowTiles; ++i) decoded[i] = Scales(stream.raw[i]);
    stream.load_scales();
#pragma unroll
    for (int t = 0; t < kGroup; ++t) {
      if (first + t < stream.end) {
        TileScales<Config::kNvfp4> scales[Config::kRowTiles];
#pragma unroll
        for (int i = 0; i < Config::kRowTiles; ++i) scales[i] = tile_scales(decoded[i], t);
        multiply_tile<Config>(sums, stream.words[t], scales, rows,
                              (first + t - block_begin) * kTileCols * 2);
      }
      stream.load_tile(t);
    }
  }
}

// Each of a thread block's kSlices slices has `slice_tiles` tile columns of k.
template <typename TA, typename TOut, bool kNvfp4, Activation kActivation, int kColTiles,
          int kRowTiles, int kWarpRows, int kWarps, int kCluster, int kBlocksPerSm,
          typename Config = MmaTile<TA, TOut, kNvfp4, kActivation, kColTiles, kRowTiles, kWarpRows,
                                    kWarps, kCluster, kBlocksPerSm>>
__global__ void __launch_bounds__(Config::kNumThreads, kBlocksPerSm)
    nvfp4_matmul_mma(const TA* a,                // (m, k)
                     const uint8_t* w,           // tiles of 16 x 64, with n and k padded
                     const uint8_t* w_scale,     // scales of these tiles
                     const float* global_scale,  // (1,), or null for MXFP4
                     const float* a_scale,       // (m,), or null for A of 16 bits
                     const TOut* bias,           // (n,) or null
                     TOut* d,                    // (m, n), or (m, n / 2) for kSwiglu
                     int m, int n, int k, int slice_tiles) {
  using Stream = typename Config::Stream;
  using Raw = typename Stream::Raw;
  extern __shared__ uint8_t dynamic_shared[];
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int lane = lane_index(), warp = warp_index();
  const int cols = slice_tiles * Config::kSlices * kTileCols;  // of A, in this block
  const int num_units = ceil_div(n, kTileRows * Config::kUnitTiles);
  const int first_unit = blockIdx.x / kCluster, step = gridDim.x / kCluster;

  // Shared memory: A's columns, partial sums, received sums, barriers.
  uint8_t* address = dynamic_shared + m * row_pitch(cols);
  float* partials = reinterpret_cast<float*>(address);
  address += Config::kSlices * Config::kUnitTiles * m * kSumsPitch * sizeof(float);
  float4* received = reinterpret_cast<float4*>(address);
  if (kCluster > 1) {
    address += 2 * kCluster * ceil_div(m * Config::kUnitTiles * kQuad, kCluster) * sizeof(float4);
  }
  typename Config::Sum sum = {.partials = partials,
                              .received = received,
                              .arrived = reinterpret_cast<Barrier*>(address),
                              .m = m};

  if constexpr (kCluster > 1) {
    if (threadIdx.x == 0) {
      sum.arrived[0].init(1);
      sum.arrived[1].init(1);
      fence_barrier_init();
    }
    cluster_arrive_relaxed();
    cluster_wait();
  }
  grid_dependency_wait();

  const int k_tiles = ceil_div(k, kTileCols);
  const int slice = rank * Config::kSlices + warp / kWarpRows;
  Stream stream = {};
  stream.codes = reinterpret_cast<const uint4*>(w) + lane;
  stream.scales = reinterpret_cast<const Raw*>(w_scale) + lane;
  stream.k_tiles = k_tiles;
  stream.num_row_tiles = ceil_div(n, kTileRows);
  stream.begin = slice * slice_tiles;
  stream.end = min(stream.begin + slice_tiles, k_tiles);
  stream.padded_end = stream.begin + ceil_div(slice_tiles, kGroup) * kGroup;
  stream.row_tile = first_unit * Config::kUnitTiles + warp % kWarpRows * kRowTiles;
  stream.row_step = step * Config::kUnitTiles;
  stream.tile = stream.begin;
  stream.load_scales();
#pragma unroll
  for (int t = 0; t < kGroup; ++t) stream.load_tile(t);

  const int block_begin = rank * Config::kSlices * slice_tiles;
  stage_activations(dynamic_shared, a, m, k, block_begin * kTileCols, cols);
  uint32_t rows[kColTiles];
#pragma unroll
  for (int j = 0; j < kColTiles; ++j) {
    const int row = min(8 * j + lane % 8, m - 1);
    rows[j] = shared_address(dynamic_shared) + row * row_pitch(cols) + lane / 8 * 16;
  }
  wait_async_copies<0>();
  __syncthreads();

  const typename Config::Output output = {
      .d = d, .global_scale = global_scale, .a_scale = a_scale, .bias = bias, .m = m, .n = n};
  const float scale = output.global() * kGrowth<kNvfp4>;
  int count = 0;
  for (int unit = first_unit; unit < num_units; unit += step, ++count) {
    typename Config::Accumulators sums = {};
    accumulate<Config>(stream, sums, rows, block_begin);
    if (unit + step >= num_units) launch_dependents();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kColTiles; ++j) {
        sum.put(warp / kWarpRows, warp % kWarpRows * kRowTiles + i, 8 * j, sums[i][j]);
      }
    }
    __syncthreads();
    sum.for_each(count, rank, [&](const float4& quad, int row, int col) {
      finish(output, quad, scale, row, unit * Config::kUnitTiles * kTileRows + col);
    });
    __syncthreads();
  }
  if constexpr (kCluster > 1) cluster_sync();
}

}  // namespace kernelcat
