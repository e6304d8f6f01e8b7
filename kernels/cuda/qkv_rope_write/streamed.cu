// For few tokens: the weights of queries, keys and values stream once through a ring of each thread
// block. The rows of a group are whole pairs of the rotation, so that a thread rotates what it
// sums.
#include <kernelcat/cache_scale.cuh>
#include <kernelcat/sequences.cuh>
#include <kernelcat/streamed_product.cuh>

namespace kernelcat {

// Heads of a token in the order of weights: queries, keys, values. A row is a place in all heads.
// Both elements of a pair of the rotation have adjacent places in a head. For RopeStyle::kNeox,
// rotary_dim is a multiple of eight: a group of rows is rotated as a whole, or not at all.
template <int kHeadDim, RopeStyle kStyle>
struct HeadRows {
  int heads, kv_heads, rotary_dim;

  struct Place {
    bool is_query, is_key;
    int head;
    int dims[2];  // of places `row` and `row` + 1, for even rows
  };

  // The element of a head that is in `place`.
  __device__ __forceinline__ int dim_at(int place) const {
    if (kStyle == RopeStyle::kInterleaved || place >= rotary_dim) return place;
    return place / 2 + (place % 2 == 0 ? 0 : rotary_dim / 2);
  }

  __device__ __forceinline__ Place at(int row) const {
    const int head = row / kHeadDim, place = row % kHeadDim;
    const bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads;
    const int first = is_query ? 0 : is_key ? heads : heads + kv_heads;
    return {is_query, is_key, head - first, {dim_at(place), dim_at(place + 1)}};
  }

  __device__ __forceinline__ int count() const { return (heads + 2 * kv_heads) * kHeadDim; }
};

template <typename T, int kHeadDim, RopeStyle kStyle>
struct ProjectionWeights {
  HeadRows<kHeadDim, kStyle> rows;
  const T *wq, *wk, *wv;
  int hidden;

  __device__ __forceinline__ RowGroup<T> operator()(int row) const {
    const auto place = rows.at(row);
    const T* head = (place.is_query ? wq
                     : place.is_key ? wk
                                    : wv) +
                    static_cast<int64_t>(place.head) * kHeadDim * hidden;
    const int step = rows.dim_at(row % kHeadDim + 2) - place.dims[0];
    return {head + static_cast<int64_t>(place.dims[0]) * hidden,
            head + static_cast<int64_t>(place.dims[1]) * hidden,
            static_cast<int64_t>(step) * hidden};
  }
};

struct TokenSlot {
  int position, page;
};

template <typename T, typename Cached, int kHeadDim, RopeStyle kStyle, Scales kScales>
struct HeadOutput {
  struct Extra {
    T bias[2];
    float cosine, sine;  // without rotation 1 and 0
    float scale;
  };

  HeadRows<kHeadDim, kStyle> rows;
  TokenSlots slots;
  int tokens;
  TokenSlot* token_slots;  // (tokens,) in shared memory
  const float* cos_sin;
  const T *bq, *bk, *bv;
  const float *k_scale, *v_scale;
  T* q_out;
  Cached *k_cache, *v_cache;

  // Finds where the tokens go, one lane for each.
  __device__ __forceinline__ void prepare() const {
    for (int token = lane_index(); token < tokens; token += kWarpThreads) {
      const int sequence = sequence_of(token, slots.cu_q, slots.batch);
      const int position = slots.position(token, sequence);
      token_slots[token] = {position, slots.page(sequence, position)};
    }
    __syncwarp();
  }

  __device__ __forceinline__ Extra load(int row, int token) const {
    const auto place = rows.at(row);
    const TokenSlot slot = token_slots[token];
    Extra extra = {.bias = {}, .cosine = 1.0f, .sine = 0.0f, .scale = 1.0f};
    const T* bias = place.is_query ? bq : place.is_key ? bk : bv;
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) extra.bias[i] = bias[place.head * kHeadDim + place.dims[i]];
    }
    const int pair = row % kHeadDim / 2, half = rows.rotary_dim / 2;
    if ((place.is_query || place.is_key) && pair < half) {
      const float* angles = cos_sin + static_cast<int64_t>(slot.position) * rows.rotary_dim;
      extra.cosine = __ldg(angles + pair);
      extra.sine = __ldg(angles + half + pair);
    }
    if (!place.is_query) {
      extra.scale = cache_scale<kScales>(place.is_key ? k_scale : v_scale, slot.page, place.head,
                                         rows.kv_heads);
    }
    return extra;
  }

  __device__ __forceinline__ void store(const Extra& extra, int row, int token, float2 z) const {
    const auto place = rows.at(row);
    const float x = z.x + to_float(extra.bias[0]), y = z.y + to_float(extra.bias[1]);
    const float first = x * extra.cosine - y * extra.sine;
    const float second = y * extra.cosine + x * extra.sine;
    if (place.is_query) {
      T* head = q_out + (static_cast<int64_t>(token) * rows.heads + place.head) * kHeadDim;
      head[place.dims[0]] = from_float<T>(first);
      head[place.dims[1]] = from_float<T>(second);
    } else {
      const TokenSlot slot = token_slots[token];
      const float inverse = kScales == Scales::kNone ? 1.0f : __fdividef(1.0f, extra.scale);
      Cached* cache = place.is_key ? k_cache : v_cache;
      Cached* head =
          cache + (slots.slot(slot.page, slot.position) * rows.kv_heads + place.head) * kHeadDim;
      head[place.dims[0]] = from_float<Cached>(first * inverse);
      head[place.dims[1]] = from_float<Cached>(second * inverse);
    }
  }
};

template <typename T, typename Cached, int kHeadDim, RopeStyle kStyle, Scales kScales, int kTokens,
          int kGroups, int kNumWarps, int kChunks, int kNumStages>
__global__ void __launch_bounds__((kNumWarps + 2) * kWarpThreads, 1)
    qkv_rope_write_streamed(const T* x,              // (tokens, hidden)
                            const T* norm_weight,    // (hidden,)
                            const T* wq,             // (heads, head_dim, hidden)
                            const T* wk,             // (kv_heads, head_dim, hidden)
                            const T* wv,             // (kv_heads, head_dim, hidden)
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
                            int tokens, int batch, int heads, int kv_heads, int table_width,
                            int page_bits, int rotary_dim, int hidden, float eps) {
  using Kind = ProductKind<T, kRowNorm<T>, kTokens, kGroups, kNumWarps, kChunks, kNumStages>;
  using Output = HeadOutput<T, Cached, kHeadDim, kStyle, kScales>;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 127;
  auto& shared =
      *reinterpret_cast<ProductShared<Kind, typename Output::Extra>*>(dynamic_shared + padding);
  const HeadRows<kHeadDim, kStyle> rows = {
      .heads = heads, .kv_heads = kv_heads, .rotary_dim = rotary_dim};
  const ProjectionWeights<T, kHeadDim, kStyle> weights = {
      .rows = rows, .wq = wq, .wk = wk, .wv = wv, .hidden = hidden};
  const Output output = {.rows = rows,
                         .slots = {.block_table = block_table,
                                   .kv_lens = kv_lens,
                                   .cu_q = cu_q,
                                   .batch = batch,
                                   .table_width = table_width,
                                   .page_bits = page_bits},
                         .tokens = tokens,
                         .token_slots = reinterpret_cast<TokenSlot*>(&shared + 1),
                         .cos_sin = cos_sin,
                         .bq = bq,
                         .bk = bk,
                         .bv = bv,
                         .k_scale = k_scale,
                         .v_scale = v_scale,
                         .q_out = q_out,
                         .k_cache = k_cache,
                         .v_cache = v_cache};
  const ActivationRows<T> activations = {
      .x = x, .norm_weight = norm_weight, .tokens = tokens, .k = hidden, .eps = eps};
  run_streamed_product(shared, GroupRange::of_block(rows.count() / kGroupRows), rows.count(),
                       weights, activations, output);
}

}  // namespace kernelcat
