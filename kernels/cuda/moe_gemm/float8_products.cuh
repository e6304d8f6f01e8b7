// The products of one tile with float8 weights by a consumer warpgroup: wgmmas of a k-block run
// while the warpgroup promotes the products before and widens the weights behind.
#pragma once

#include "decoded_sums.cuh"

namespace kernelcat {

// A warpgroup multiplies its rows of W by the rows of A in passes over a k-block: 64 rows of W in a
// pass, by all rows of A or by a part of them. Two sets of products take turns from pass to pass:
// wgmma writes one set while the other one is promoted. After an odd number of passes, the next
// k-block begins with the other set.
template <typename Config>
struct Float8Products {
  static constexpr int kBlocks = Config::kRowBlocks;  // of 64 rows of W
  // Rows of A in a pass. Two sets for all of 128 rows do not fit into registers beside the sums.
  static constexpr int kCols = Config::BLOCK_M < 128    ? Config::BLOCK_M
                               : Config::BLOCK_M == 128 ? 64
                                                        : 48;
  static constexpr int kParts = Config::BLOCK_M / kCols;
  static constexpr int kNumPasses = kBlocks * kParts;
  static constexpr bool kIsOdd = kNumPasses % 2 == 1;
  static constexpr int kTiles = Config::kStageTiles;  // of a row block in a stage
  static_assert(kTiles == 2 && kCols * kParts == Config::BLOCK_M);
  static_assert(kCols % 8 == 0, "a pass begins where the swizzle does");
  using T = typename Config::T;
  using Sums = typename Config::Sums;

  DecodedShared<Config>& shared;
  PipelineState<Config::kNumStages>& position;
  float products[2][kCols / 2];
  float scales[2];                      // of the weights of each set
  uint32_t operands[2][kTileSteps][4];  // of each tile of a row block
  Float8Tile<T> tiles[2];               // of the row block that is multiplied next
  float scale;                          // of the weights in `tiles`
  int stage;                            // of the latest pass

  __device__ __forceinline__ Float8Products(DecodedShared<Config>& shared,
                                            PipelineState<Config::kNumStages>& position)
      : shared(shared), position(position) {}

  // Loads the weights of a row block of `source` to registers.
  __device__ __forceinline__ void load(int source, int block) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) tiles[i] = tile_of(shared, source, i * kBlocks + block);
  }

  // Waits for the stage of `position` and loads its first row block, and the scale of the
  // warpgroup's rows.
  __device__ __forceinline__ void load_next_stage() {
    wait_full(shared, position);
    load(position.stage, 0);
    const int scale_block = warp_index() / 4 * kBlocks * kWgmmaM / kScaleBlock;
    scale = shared.scales[position.stage].b[kBlocks == 1 ? 0 : scale_block];
  }

  // Starts the wgmmas of the `i`-th tile of pass `pass`, whose set is `set`.
  __device__ __forceinline__ void multiply(int pass, int set, int i) {
    const uint32_t a = shared_address(shared.stages[stage].a[i]);
    const uint32_t first_row = pass % kParts * kCols;
    multiply_packed_tile<T, kCols>(products[set], operands[i],
                                   swizzled_rows_descriptor(a + first_row * kRowBytes), i > 0);
  }

  // Starts pass `pass`, whose set is `set`, and promotes the pass before. Returns when the wgmmas
  // of the first tile have completed. `has_previous` and `has_next`: whether k-blocks of this tile
  // come before and after the k-block of the pass.
  __device__ __forceinline__ void start(Sums& sums, int pass, int set, bool has_previous,
                                        bool has_next) {
    const bool is_new_block = pass % kParts == 0, is_last_part = pass % kParts == kParts - 1;
    const bool is_last = pass == kNumPasses - 1;
    const int previous = stage;
    if (pass == 0) {
      stage = position.stage;
      position.advance();
    }
    if (is_new_block) tiles[0].decode_into(operands[0]);
    scales[set] = scale;
    multiply(pass, set, 0);
    wgmma_wait<1>();
    pin(operands[1]);
    pin(products[set ^ 1]);
    if (pass == 0 && has_previous) release_stage<1>(shared.empty[previous]);
    promote(sums, (pass + kNumPasses - 1) % kNumPasses, set ^ 1);
    if (is_new_block) tiles[1].decode_into(operands[1]);
    multiply(pass, set, 1);
    if (!is_last && is_last_part) load(stage, pass / kParts + 1);
    if (is_last && has_next) load_next_stage();
    wgmma_wait<1>();
    pin(operands[0]);
  }

  // Starts all passes of the next k-block, which is an odd or an even one.
  __device__ __forceinline__ void start_block(Sums& sums, bool is_odd, bool has_previous,
                                              bool has_next) {
#pragma unroll
    for (int pass = 0; pass < kNumPasses; ++pass) {
      const int set = (pass + (kIsOdd && is_odd)) % 2;
      start(sums, pass, set, pass > 0 || has_previous, has_next);
    }
  }

  // Waits for the latest pass, whose set is `set`, and promotes it.
  __device__ __forceinline__ void finish(Sums& sums, int set) {
    wgmma_wait<0>();
    pin(products[set]);
    release_stage<1>(shared.empty[stage]);
    promote(sums, kNumPasses - 1, set);
  }

  // Adds the products of pass `pass` in `set`, times the scale of their weights, to their sums.
  __device__ __forceinline__ void promote(Sums& sums, int pass, int set) {
    const int first = pass % kParts * (kCols / 2);
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) {
      sums[pass / kParts][first + i] += scales[set] * products[set][i];
    }
  }

  // Sets `sums` to the products of `num_k` k-blocks.
  __device__ __forceinline__ void add_to(Sums& sums, int num_k) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Config::BLOCK_M / 2; ++i) sums[block][i] = 0.0f;
    }
    // What the first pass promotes.
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) products[1][i] = 0.0f;
    scales[1] = 0.0f;
    stage = 0;
    load_next_stage();
    int k_block = 0;
    for (; k_block + 1 < num_k; k_block += 2) {
      start_block(sums, false, k_block > 0, true);
      start_block(sums, true, true, k_block + 2 < num_k);
    }
    // An even number of passes needs both endings, too: if the loop has one ending, ptxas takes
    // products for read too early and serializes all wgmmas (C7514).
    if (k_block < num_k) {
      start_block(sums, false, k_block > 0, false);
      finish(sums, kIsOdd ? 0 : 1);
    } else {
      finish(sums, 1);
    }
  }
};

}  // namespace kernelcat
