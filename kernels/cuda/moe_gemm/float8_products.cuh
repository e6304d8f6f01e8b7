// The products of one tile with float8 weights by a consumer warpgroup: wgmmas of a k-block run
// while the warpgroup promotes the products before and widens the weights behind.
#pragma once

#include "decoded_sums.cuh"

namespace kernelcat {

// A warpgroup multiplies 64 rows of W by the rows of A in passes over a k-block. Two sets of
// products take turns: wgmma writes one set while the other one is promoted. A tile of up to 96
// rows of A takes one pass, and sets alternate from k-block to k-block. A tile of 128 rows takes
// two passes of half of the rows, because two sets for all rows do not fit into registers. Set 0
// then belongs to the first half, set 1 to the second half.
template <typename Config>
struct Float8Products {
  static constexpr int kNumPasses = Config::BLOCK_M < 128 ? 1 : 2;
  static constexpr int kCols = Config::BLOCK_M / kNumPasses;  // rows of A in a pass
  static constexpr int kTiles = Config::kStageTiles;
  static_assert(Config::kRowBlocks == 1 && kTiles == 2);
  using T = typename Config::T;
  using Sums = float[Config::BLOCK_M / 2];

  DecodedShared<Config>& shared;
  PipelineState<Config::kNumStages>& position;
  float products[2][kCols / 2];
  float scales[2];                      // of the weights of each set
  uint32_t operands[2][kTileSteps][4];  // of each tile of a stage
  Float8Tile<T> tiles[2];               // of the stage that is multiplied next
  float scale;                          // of the weights in `tiles`
  int stage;                            // of the latest pass

  __device__ __forceinline__ Float8Products(DecodedShared<Config>& shared,
                                            PipelineState<Config::kNumStages>& position)
      : shared(shared), position(position) {}

  // Waits for the stage of `position` and loads its weights to registers.
  __device__ __forceinline__ void load() {
    wait_full(shared, position);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) tiles[i] = tile_of(shared, position.stage, i);
    scale = shared.scales[position.stage].b[0];
  }

  // Starts the wgmmas of the `i`-th tile of the latest pass, whose set is `set`.
  __device__ __forceinline__ void multiply(int set, int i) {
    const uint32_t a = shared_address(shared.stages[stage].a[i]);
    const uint32_t first_row = kNumPasses == 1 ? 0 : set * kCols;
    multiply_packed_tile<T, kCols>(products[set], operands[i],
                                   swizzled_rows_descriptor(a + first_row * kRowBytes), i > 0);
  }

  // Starts the next pass, whose set is `set`, and promotes the pass before. Returns when the wgmmas
  // of the first tile have completed. `has_previous` and `has_next`: whether k-blocks of this tile
  // come before and after the k-block of the pass.
  __device__ __forceinline__ void start(Sums& sums, int set, bool has_previous, bool has_next) {
    const bool is_first = kNumPasses == 1 || set == 0, is_last = kNumPasses == 1 || set == 1;
    const int previous = stage;
    if (is_first) {
      stage = position.stage;
      position.advance();
      tiles[0].decode_into(operands[0]);
    }
    scales[set] = scale;
    multiply(set, 0);
    wgmma_wait<1>();
    pin(operands[1]);
    pin(products[set ^ 1]);
    if (is_first && has_previous) release_stage<1>(shared.empty[previous]);
    promote(sums, set ^ 1);
    if (is_first) tiles[1].decode_into(operands[1]);
    multiply(set, 1);
    if (is_last && has_next) load();
    wgmma_wait<1>();
    pin(operands[0]);
  }

  // Starts all passes of the next k-block, which is an odd or an even one.
  __device__ __forceinline__ void start_block(Sums& sums, bool is_odd, bool has_previous,
                                              bool has_next) {
    if constexpr (kNumPasses == 1) {
      start(sums, is_odd, has_previous, has_next);
    } else {
      start(sums, 0, has_previous, true);
      start(sums, 1, true, has_next);
    }
  }

  // Waits for the latest pass, whose set is `set`, and promotes it.
  __device__ __forceinline__ void finish(Sums& sums, int set) {
    wgmma_wait<0>();
    pin(products[set]);
    release_stage<1>(shared.empty[stage]);
    promote(sums, set);
  }

  // Adds the products of `set`, times the scale of their weights, to the sums of their rows of A.
  __device__ __forceinline__ void promote(Sums& sums, int set) {
    const int first = kNumPasses == 1 ? 0 : set * (kCols / 2);
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) sums[first + i] += scales[set] * products[set][i];
  }

  // Sets `sums` to the products of `num_k` k-blocks.
  __device__ __forceinline__ void add_to(Sums& sums, int num_k) {
#pragma unroll
    for (int i = 0; i < Config::BLOCK_M / 2; ++i) sums[i] = 0.0f;
    // What the first pass promotes.
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) products[1][i] = 0.0f;
    scales[1] = 0.0f;
    stage = 0;
    load();
    int k_block = 0;
    for (; k_block + 1 < num_k; k_block += 2) {
      start_block(sums, false, k_block > 0, true);
      start_block(sums, true, true, k_block + 2 < num_k);
    }
    // Two passes a k-block need both endings, too: if the loop has one ending, ptxas takes products
    // for read too early and serializes all wgmmas (C7514).
    if (k_block < num_k) {
      start_block(sums, false, k_block > 0, false);
      finish(sums, kNumPasses == 1 ? 0 : 1);
    } else {
      finish(sums, 1);
    }
  }
};

}  // namespace kernelcat
