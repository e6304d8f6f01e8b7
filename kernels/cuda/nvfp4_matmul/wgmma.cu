// D = activation(A @ W^T + bias) for many rows of A on Hopper, as D^T = W A^T: a persistent kernel
// in which one warp fills a ring with packed weights and rows of A, and two warpgroups decode the
// former into the registers from which wgmma takes its left operand.
//
// Weights as wgmma's operand in registers are Machete's (vLLM) and CUTLASS's mixed-input kernels';
// the order of work is gemm's.
#include <kernelcat/split_k.cuh>

#include "wgmma_result.cuh"
#include "wgmma_tile.cuh"

namespace kernelcat {

// A warp's tile of W: a lane's codes, and its two rows' scales. Zeros for a tile that is not there.
template <typename Config>
struct PackedTile {
  using Scales = GroupScales<typename Config::T, Config::kNvfp4>;
  uint4 words;
  typename Scales::Raw raw;

  __device__ __forceinline__ PackedTile(const Fp4WgmmaStage<Config>& stage, int row, int tile,
                                        bool is_there)
      : words{}, raw{} {
    using Raw = typename Scales::Raw;
    const int lane = lane_index();
    const uint4* codes = reinterpret_cast<const uint4*>(stage.codes[row][tile]);
    const Raw* scales = reinterpret_cast<const Raw*>(stage.scales[row][tile]);
    if (is_there) {
      words = codes[lane];
      raw = scales[lane / 4];
    }
  }

  // The left operands of a tile's four steps.
  __device__ __forceinline__ void decode_into(uint32_t (&operands)[kTileSteps][4]) const {
    using T = typename Config::T;
    constexpr bool kNvfp4 = Config::kNvfp4;
    const Scales decoded(raw);
    TileScales<kNvfp4> scales;
#pragma unroll
    for (int i = 0; i < TileScales<kNvfp4>::kWords; ++i) scales.pairs[i] = decoded.pairs[i];
    decode<T, kNvfp4, 0>(operands[0], words.x, scales);
    decode<T, kNvfp4, 1>(operands[1], words.y, scales);
    decode<T, kNvfp4, 2>(operands[2], words.z, scales);
    decode<T, kNvfp4, 3>(operands[3], words.w, scales);
  }
};

// Starts a tile's products; `a` describes 64 columns of A.
template <typename Config>
__device__ __forceinline__ void multiply_tile(typename Config::Sums& sums,
                                              uint32_t (&operands)[kTileSteps][4], uint64_t a,
                                              bool accumulate) {
  pin(sums);
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) pin_operand(operands[s]);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) {
    WgmmaWeights<typename Config::T, Config::BLOCK_N>::multiply(
        sums, operands[s], advanced(a, s * kWgmmaK * 2), accumulate || s > 0);
  }
  wgmma_commit();
  pin(sums);
}

// A warp is done with a stage; what it read by ordinary loads is behind it for the copy engine too.
__device__ __forceinline__ void give_back(Barrier& empty) {
  fence_async_shared();
  __syncwarp();
  if (lane_index() == 0) empty.arrive();
}

// One unit of work: a tile's weights are decoded while the products of the one before run.
template <typename Config>
__device__ __forceinline__ void accumulate(Fp4WgmmaShared<Config>& shared,
                                           RingPosition<Config::kNumStages>& position,
                                           typename Config::Sums& sums, const Work& work,
                                           int k_tiles) {
  uint32_t operands[Config::kStageTiles][kTileSteps][4];
  const int row = threadIdx.x / kWarpThreads;
  int previous = 0;
  for (int block = work.k_begin; block < work.k_end; ++block) {
    const int stage_idx = position.stage;
    Fp4WgmmaStage<Config>& stage = shared.stages[stage_idx];
    shared.full[stage_idx].wait(position.parity);
#pragma unroll
    for (int t = 0; t < Config::kStageTiles; ++t) {
      const bool is_there = block * Config::kStageTiles + t < k_tiles;
      PackedTile<Config>(stage, row, t, is_there).decode_into(operands[t]);
      multiply_tile<Config>(sums, operands[t], swizzled_rows_descriptor(shared_address(stage.a[t])),
                            t > 0 || block > work.k_begin);
      wgmma_wait<1>();
#pragma unroll
      for (int s = 0; s < kTileSteps; ++s) pin_operand(operands[1 - t][s]);
      if (t == 0 && block > work.k_begin) give_back(shared.empty[previous]);
    }
    previous = stage_idx;
    position.advance();
  }
  wgmma_wait<0>();
  pin(sums);
  give_back(shared.empty[previous]);
}

// Runs in a consumer warpgroup.
template <typename Config>
__device__ __forceinline__ void consume(Fp4WgmmaShared<Config>& shared,
                                        const BlockSchedule<Config>& schedule,
                                        const typename Config::Output& output, int k_tiles,
                                        float* partials, uint32_t* counters) {
  constexpr int kPartials = kWgmmaM * Config::BLOCK_N;
  const int consumer = warp_index() / 4;
  RingPosition<Config::kNumStages> position;
  schedule.for_each([&](const Work& work, int first_row, int col) {
    const int row = first_row + consumer * kWgmmaM;
    typename Config::Sums sums[1];
    accumulate<Config>(shared, position, sums[0], work, k_tiles);
    if constexpr (Config::kSplit) {
      const int slot = work.part * Config::kNumConsumers + consumer;
      const int rows_left = max(output.n - row - warp_index() % 4 * 16, 0);
      const int cols_left = max(output.m - col, 0);
      const int64_t first = static_cast<int64_t>(slot) * kPartials * schedule.list.num_splits;
      if (work.part >= 0 &&
          !reduce_splits(sums, partials + first, counters + slot, work.split,
                         schedule.list.num_splits, ceil_div(rows_left, kWgmmaM),
                         &shared.is_last[consumer], 1 + consumer, ceil_div(cols_left, 8) * 4)) {
        return;
      }
    }
    store_transposed<Config::BLOCK_N>(sums[0], output, output.global() * kGrowth<Config::kNvfp4>,
                                      row, col);
  });
}

// With kSplit all tiles but the first `num_whole` are computed in `num_splits` pieces; for these
// `partials` holds 128 * BLOCK_N floats a piece and `counters` one zero a tile and warpgroup.
template <typename T, typename TOut, bool kNvfp4, Activation kActivation, bool kRowScale,
          int BLOCK_N, int kNumStages, bool kSplit,
          typename Config =
              Fp4WgmmaTile<T, TOut, kNvfp4, kActivation, kRowScale, BLOCK_N, kNumStages, kSplit>>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    nvfp4_matmul_wgmma(const __grid_constant__ TensorMap map_a,  // (m, k), boxes BLOCK_N x 64
                       const uint8_t* w,                         // tiles of 16 x 64, padded
                       const uint8_t* w_scale,                   // tiles, too
                       const float* global_scale,                // (1,), or null for MXFP4
                       const float* a_scale,                     // (m,), or null for A of 16 bits
                       const TOut* bias,                         // (n,) or null
                       TOut* d,  // (m, n), or (m, n / 2) for kSwiglu
                       float* partials, uint32_t* counters, int m, int n, int k, int num_whole,
                       int num_splits, int group_m) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<Fp4WgmmaShared<Config>*>(dynamic_shared + padding);
  const auto schedule = [&] {
    return BlockSchedule<Config>::of(m, n, k, num_whole, num_splits, group_m);
  };

  if (threadIdx.x == 0) {
    prefetch_map(map_a);
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) barrier.init(Config::kNumConsumers * 4);
    fence_barrier_init();
  }
  __syncthreads();
  grid_dependency_wait();

  if (warp_index() / 4 == Config::kNumConsumers) {
    decrease_registers<Config::kProducerRegisters>();
    if (warp_index() % 4 == 0) produce<Config>(shared, schedule(), map_a, w, w_scale, n, k);
  } else {
    increase_registers<Config::kRegisters>();
    consume<Config>(shared, schedule(), {d, global_scale, a_scale, bias, m, n},
                    ceil_div(k, kTileCols), partials, counters);
  }
}

}  // namespace kernelcat
