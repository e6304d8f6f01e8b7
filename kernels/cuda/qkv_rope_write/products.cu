// For tens of tokens: every thread block multiplies a tile of rows of weights, whole heads, by all
// normalized tokens, in a split of the columns. One thread fills a ring of stages by TMA, and a
// warpgroup multiplies from the ring by wgmma. The thread block that ends last adds up the splits
// of its tile, and rotates and stores the heads. Weights are on their way before the kernel that
// normalizes has ended.
//
// barrier  | who arrives (how many)               | who waits | for what
// full[s]  | producer, with the stage's bytes (1) | consumers | stage s holds its k-block
// empty[s] | consumer warps (4)                   | producer  | stage s has been read
// found    | lanes of the last warp (32)          | consumers | the tokens' positions and pages
// named 1  | consumers (128)                      | consumers | sums in shared memory
#include <kernelcat/bulk_copy.cuh>
#include <kernelcat/cache_policy.cuh>
#include <kernelcat/cache_scale.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/rope_element.cuh>
#include <kernelcat/sequences.cuh>
#include <kernelcat/split_k.cuh>
#include <kernelcat/stage_release.cuh>
#include <kernelcat/wgmma_stage.cuh>

namespace kernelcat {

struct TokenSlot {
  int position, page;
};

// A tile has kRows rows of weights, whole heads; kTokens are the tokens with padding.
template <typename T_, typename Cached_, int kHeadDim_, RopeStyle kStyle_, Scales kScales_,
          int kTokens_, int kNumStages_>
struct ProductTile {
  using T = T_;
  using Cached = Cached_;
  static constexpr int kHeadDim = kHeadDim_, kTokens = kTokens_, kNumStages = kNumStages_;
  static constexpr RopeStyle kStyle = kStyle_;
  static constexpr Scales kScales = kScales_;
  static constexpr int kRows = kHeadDim > kWgmmaM ? kHeadDim : kWgmmaM;
  static constexpr int kNumWgmmas = kRows / kWgmmaM;  // below each other
  static constexpr int kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kRowBytes;
  static constexpr int kPitch = kRows + 4;  // floats of a token's sums; spreads banks
  static constexpr int kProducerWarp = 4, kNumThreads = kWarpgroupThreads + 2 * kWarpThreads;
  static_assert(kRows % kHeadDim == 0 && kRows % kWgmmaM == 0, "whole heads, whole wgmmas");
  static_assert(kTokens * kPitch * 4 <= kNumStages * kStageBytes, "sums take the ring's place");

  using Sums = float[kNumWgmmas][kTokens / 2];
};

template <typename Tile>
struct ProductShared {
  alignas(1024) uint8_t stages[Tile::kNumStages][Tile::kStageBytes];  // weights, then tokens
  TokenSlot slots[Tile::kTokens];
  Barrier full[Tile::kNumStages];
  Barrier empty[Tile::kNumStages];
  Barrier found;
  uint32_t is_last;

  // Sums and biases (kTokens, kPitch), once the ring has been read.
  __device__ __forceinline__ float* sums() { return reinterpret_cast<float*>(stages); }
};

// The k-blocks of a thread block.
struct KRange {
  int begin, end;

  static __device__ __forceinline__ KRange of(int k, int split, int num_splits) {
    const int num_blocks = ceil_div(k, BLOCK_K);
    return {split * num_blocks / num_splits, (split + 1) * num_blocks / num_splits};
  }
};

// Loads a stage's weights for the `row`s from there on.
template <typename Tile>
__device__ __forceinline__ void load_weights(ProductShared<Tile>& shared, int stage,
                                             const TensorMap& map, int k_block, int row) {
  shared.full[stage].arrive_expect(Tile::kStageBytes);
  tensor_load(shared.stages[stage], map, k_block * BLOCK_K, row, shared.full[stage],
              kDefaultPolicy);
}

template <typename Tile>
__device__ __forceinline__ void load_tokens(ProductShared<Tile>& shared, int stage,
                                            const TensorMap& map, int k_block) {
  tensor_load(shared.stages[stage] + Tile::kWeightBytes, map, k_block * BLOCK_K, 0,
              shared.full[stage], kDefaultPolicy);
}

// The producer; runs in one thread. No kernel writes weights, so the ring's first weights do not
// wait for the kernel that normalizes.
template <typename Tile>
__device__ __forceinline__ void produce(ProductShared<Tile>& shared, const TensorMap& weights,
                                        const TensorMap& tokens, KRange range, int row) {
  const int num_early = min(range.end - range.begin, Tile::kNumStages);
  for (int i = 0; i < num_early; ++i) load_weights(shared, i, weights, range.begin + i, row);
  grid_dependency_wait();
  for (int i = 0; i < num_early; ++i) load_tokens(shared, i, tokens, range.begin + i);
  PipelineState<Tile::kNumStages> position;
  for (int k_block = range.begin + num_early; k_block < range.end; ++k_block) {
    shared.empty[position.stage].wait(position.phase);
    load_weights(shared, position.stage, weights, k_block, row);
    load_tokens(shared, position.stage, tokens, k_block);
    position.advance();
  }
  launch_dependents();
}

template <typename Tile>
__device__ __forceinline__ void accumulate(ProductShared<Tile>& shared, typename Tile::Sums& sums,
                                           int num_k) {
  const uint32_t base = shared_address(shared.stages);
  const uint64_t a = swizzled_rows_descriptor(base);
  const uint64_t b = swizzled_rows_descriptor(base + Tile::kWeightBytes);
  PipelineState<Tile::kNumStages> position;
  int previous = 0;
  for (int i = 0; i < num_k; ++i) {
    const int stage = position.stage;
    shared.full[stage].wait(position.phase);
    multiply_stage<typename Tile::T, Tile::kTokens>(sums, advanced(a, stage * Tile::kStageBytes),
                                                    advanced(b, stage * Tile::kStageBytes), i > 0);
    if (i > 0) {
      wgmma_wait<1>();
      release_stage<1>(shared.empty[previous]);
    }
    previous = stage;
    position.advance();
  }
  wgmma_wait<0>();
  pin(sums);
}

// A tile's place among the heads of queries, keys and values.
struct TileHeads {
  bool is_query, is_key;
  int row;  // the first, among those of its kind

  static __device__ __forceinline__ TileHeads of(int row, int query_rows, int key_rows) {
    if (row < query_rows) return {true, false, row};
    const bool is_key = row < query_rows + key_rows;
    return {false, is_key, row - query_rows - (is_key ? 0 : key_rows)};
  }
};

template <typename Tile>
struct HeadOutput {
  using T = typename Tile::T;
  using Cached = typename Tile::Cached;
  TokenSlots slots;
  int tokens, heads, kv_heads, rotary_dim;
  const float* cos_sin;
  const float* scale;  // of keys or of values
  T* q_out;
  Cached* cache;

  // Finds where the tokens go, one lane for each.
  __device__ __forceinline__ void find(TokenSlot* found) const {
    for (int token = lane_index(); token < tokens; token += kWarpThreads) {
      const int sequence = sequence_of(token, slots.cu_q, slots.batch);
      const int position = slots.position(token, sequence);
      found[token] = {position, slots.page(sequence, position)};
    }
  }

  // Rotates and stores a tile whose sums are in shared memory: a vector of a head at a time.
  __device__ __forceinline__ void store(const float* sums, const TokenSlot* found,
                                        const TileHeads& tile) const {
    constexpr int kVectors = Tile::kRows / kVector;  // of a token
    for (int i = threadIdx.x; i < tokens * kVectors; i += kWarpgroupThreads) {
      const int token = i / kVectors, first = i % kVectors * kVector;
      const int head = (tile.row + first) / Tile::kHeadDim, dim = first % Tile::kHeadDim;
      const float* z = sums + token * Tile::kPitch + first - dim;
      const TokenSlot slot = found[token];
      const float* angles = cos_sin + static_cast<int64_t>(slot.position) * rotary_dim;
      const int rotated_dims = tile.is_query || tile.is_key ? rotary_dim : 0;
      float values[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        values[j] = rotated<Tile::kStyle>(z, dim + j, angles, rotated_dims);
      }
      if (tile.is_query) {
        const int64_t row = static_cast<int64_t>(token) * heads + head;
        store_vector(q_out + row * Tile::kHeadDim + dim, values, 1.0f);
      } else {
        const float inverse = inverse_scale<Tile::kScales>(scale, slot.page, head, kv_heads);
        const int64_t row = slots.slot(slot.page, slot.position) * kv_heads + head;
        store_vector(cache + row * Tile::kHeadDim + dim, values, inverse);
      }
    }
  }

  // Rounds values * factor.
  template <typename Stored>
  static __device__ __forceinline__ void store_vector(Stored* target,
                                                      const float (&values)[kVector],
                                                      float factor) {
    if constexpr (sizeof(Stored) == 1) {
      *reinterpret_cast<uint2*>(target) =
          uint2{pack_four_e4m3(values, factor), pack_four_e4m3(values + 4, factor)};
    } else {
      uint32_t pairs[kVector / 2];
#pragma unroll
      for (int j = 0; j < kVector / 2; ++j) {
        pairs[j] = pack<Stored>(values[2 * j] * factor, values[2 * j + 1] * factor);
      }
      *reinterpret_cast<uint4*>(target) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
};

// Writes sums + bias to shared memory; `bias` is the tile's first, or null.
template <typename Tile>
__device__ __forceinline__ void stage_sums(float* staged, const typename Tile::Sums& sums,
                                           const typename Tile::T* bias) {
  const int first = warp_index() * 16 + lane_index() / 4, token = lane_index() % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < Tile::kNumWgmmas; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * kWgmmaM + first + half * 8;
      const float more = bias == nullptr ? 0.0f : to_float(bias[row]);
#pragma unroll
      for (int i = 0; i < Tile::kTokens / 8; ++i) {
        float* target = staged + (i * 8 + token) * Tile::kPitch + row;
        target[0] = sums[tile][4 * i + 2 * half] + more;
        target[Tile::kPitch] = sums[tile][4 * i + 2 * half + 1] + more;
      }
    }
  }
}

// The consumer, a warpgroup; `partials` and `counter` are the tile's.
template <typename Tile>
__device__ __forceinline__ void consume(ProductShared<Tile>& shared, const HeadOutput<Tile>& output,
                                        const TileHeads& heads, const typename Tile::T* bias,
                                        float* partials, uint32_t* counter, int num_k, int split,
                                        int num_splits) {
  constexpr int kBarrier = 1;
  typename Tile::Sums sums;
  accumulate(shared, sums, num_k);
  grid_dependency_wait();  // an earlier launch may still use the partial sums
  if (num_splits > 1) {
    const int num_sums = ceil_div(output.tokens, 8) * 4;
    if (!reduce_splits(sums, partials, counter, split, num_splits, Tile::kNumWgmmas,
                       &shared.is_last, kBarrier, num_sums)) {
      return;
    }
  } else {
    named_barrier_sync(kBarrier, kWarpgroupThreads);  // all warps have read the ring
  }
  stage_sums<Tile>(shared.sums(), sums, bias);
  shared.found.wait(0);
  named_barrier_sync(kBarrier, kWarpgroupThreads);
  output.store(shared.sums(), shared.slots, heads);
}

template <typename T, typename Cached, int kHeadDim, RopeStyle kStyle, Scales kScales, int kTokens,
          int kNumStages,
          typename Tile = ProductTile<T, Cached, kHeadDim, kStyle, kScales, kTokens, kNumStages>>
__global__ void __launch_bounds__(Tile::kNumThreads, 2) qkv_rope_write_products(
    const __grid_constant__ TensorMap map_a,   // normalized tokens, boxes of kTokens rows
    const __grid_constant__ TensorMap map_wq,  // (heads * head_dim, hidden), boxes of kRows
    const __grid_constant__ TensorMap map_wk,  // (kv_heads * head_dim, hidden), as the next
    const __grid_constant__ TensorMap map_wv,
    const int* block_table,  // (batch, table_width)
    const int* kv_lens,      // (batch,)
    const int* cu_q,         // (batch + 1,)
    const float* cos_sin,    // (positions, rotary_dim)
    const T* bq,             // (heads, head_dim) or null, as the next two
    const T* bk,             // (kv_heads, head_dim)
    const T* bv,             // (kv_heads, head_dim)
    const float* k_scale,    // (1 or pages, kv_heads) or null
    const float* v_scale,    // (1 or pages, kv_heads) or null
    T* q_out,                // (tokens, heads, head_dim)
    Cached* k_cache,         // (pages, page_size, kv_heads, head_dim)
    Cached* v_cache,         // (pages, page_size, kv_heads, head_dim)
    float* partials,         // (tiles, num_splits, kRows * kTokens)
    uint32_t* counters,      // (tiles,), zeros
    int tokens, int batch, int heads, int kv_heads, int table_width, int page_bits, int rotary_dim,
    int hidden, int num_splits) {
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;
  auto& shared = *reinterpret_cast<ProductShared<Tile>*>(dynamic_shared + padding);
  const int tile = blockIdx.x / num_splits, split = blockIdx.x % num_splits;
  const TileHeads place = TileHeads::of(tile * Tile::kRows, heads * kHeadDim, kv_heads * kHeadDim);
  const KRange range = KRange::of(hidden, split, num_splits);
  if (threadIdx.x == 0) {
    for (Barrier& barrier : shared.full) barrier.init(1);
    for (Barrier& barrier : shared.empty) barrier.init(4);
    shared.found.init(kWarpThreads);
    fence_barrier_init();
  }
  __syncthreads();

  const HeadOutput<Tile> output = {.slots = {.block_table = block_table,
                                             .kv_lens = kv_lens,
                                             .cu_q = cu_q,
                                             .batch = batch,
                                             .table_width = table_width,
                                             .page_bits = page_bits},
                                   .tokens = tokens,
                                   .heads = heads,
                                   .kv_heads = kv_heads,
                                   .rotary_dim = rotary_dim,
                                   .cos_sin = cos_sin,
                                   .scale = place.is_key ? k_scale : v_scale,
                                   .q_out = q_out,
                                   .cache = place.is_key ? k_cache : v_cache};
  if (warp_index() < Tile::kProducerWarp) {
    const T* bias = place.is_query ? bq : place.is_key ? bk : bv;
    const int64_t first = static_cast<int64_t>(tile) * num_splits * (Tile::kRows * kTokens);
    consume<Tile>(shared, output, place, bias == nullptr ? nullptr : bias + place.row,
                  partials + first, counters + tile, range.end - range.begin, split, num_splits);
  } else if (warp_index() == Tile::kProducerWarp) {
    if (elect_one()) {
      const TensorMap& weights = place.is_query ? map_wq : place.is_key ? map_wk : map_wv;
      produce<Tile>(shared, weights, map_a, range, place.row);
    }
  } else {
    grid_dependency_wait();
    output.find(shared.slots);
    shared.found.arrive();
  }
}

}  // namespace kernelcat
