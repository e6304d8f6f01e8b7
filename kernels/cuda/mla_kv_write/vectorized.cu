// One warp for each token: a lane takes 16 latent values, in two vectors of 16 bytes, and one pair
// of the rotated part.
#include "cached_row.cuh"

namespace kernelcat {

constexpr int kVectors = 2;                              // of a lane
constexpr int kLaneLatents = kVectors * kVector;         // latent values of a lane
constexpr int kScaleLanes = kScaleGroup / kLaneLatents;  // lanes that share a scale
static_assert(kLaneLatents * kWarpThreads == kLatent && kRope == 2 * kWarpThreads);

// A lane's part of a token. It is loaded before the token's slot is known.
template <typename T, RopeStyle kStyle>
struct LanePart {
  uint4 vectors[kVectors];  // of latent values
  T pair[2];                // of the rotated part

  // The first column of a vector. The 16 bytes that a lane stores into a packed row come from
  // neighbouring columns; elsewhere the vectors of neighbouring lanes are neighbours.
  template <bool kPacked>
  static __device__ __forceinline__ int column(int vector) {
    return kPacked ? lane_index() * kLaneLatents + vector * kVector
                   : (vector * kWarpThreads + lane_index()) * kVector;
  }

  // `c` is (tokens, 512), `k_pe` (tokens, 64).
  template <bool kPacked>
  __device__ __forceinline__ void load(const T* c, const T* k_pe, int token) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const T* source = c + static_cast<int64_t>(token) * kLatent + column<kPacked>(i);
      vectors[i] = __ldcs(reinterpret_cast<const uint4*>(source));
    }
    const T* source = k_pe + static_cast<int64_t>(token) * kRope;
    if constexpr (kStyle == RopeStyle::kInterleaved) {
      const uint32_t word = __ldcs(reinterpret_cast<const uint32_t*>(source) + lane_index());
      *reinterpret_cast<uint32_t*>(pair) = word;
    } else {
      pair[0] = source[lane_index()];
      pair[1] = source[lane_index() + kRope / 2];
    }
  }

  template <typename Cached>
  __device__ __forceinline__ void store_latents(const CachedRow<Cached>& row) const {
    if constexpr (CachedRow<Cached>::kPacked) {
      store_quantized(row);
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        *reinterpret_cast<uint4*>(row.latents() + column<false>(i)) = vectors[i];
      }
    }
  }

  template <typename Cached>
  __device__ __forceinline__ void store_rope(const CachedRow<Cached>& row, bool rotates,
                                             float cosine, float sine) const {
    float2 values = {to_float(pair[0]), to_float(pair[1])};
    if (rotates) values = rotated(values, cosine, sine);
    T* target = reinterpret_cast<T*>(row.rope()) + first_of_pair<kStyle>(lane_index());
    if constexpr (kStyle == RopeStyle::kInterleaved) {
      *reinterpret_cast<uint32_t*>(target) = pack<T>(values.x, values.y);
    } else {
      target[0] = from_float<T>(values.x);
      target[kRope / 2] = from_float<T>(values.y);
    }
  }

 private:
  __device__ __forceinline__ void store_quantized(const CachedRow<PackedRow>& row) const {
    const int lane = lane_index();
    const T* elements = reinterpret_cast<const T*>(vectors);
    float values[kLaneLatents], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneLatents; ++i) {
      values[i] = to_float(elements[i]);
      amax = fmaxf(amax, fabsf(values[i]));
    }
    const float scale = scale_of(max_of_lanes<kScaleLanes>(amax));
    const float inverse = inverse_power_of_two(scale);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_four_e4m3(values + 4 * i, inverse);
    reinterpret_cast<uint4*>(row.begin)[lane] = {words[0], words[1], words[2], words[3]};
    if (lane % kScaleLanes == 0) row.scales()[lane / kScaleLanes] = scale;
  }
};

// A warp takes kTokens neighbouring tokens, and starts to load all of them before it looks up the
// slot of the first.
template <typename T, typename Cached, RopeStyle kStyle, int kThreads, int kTokens>
__global__ void __launch_bounds__(kThreads)
    mla_kv_write_vectorized(const T* c,              // (tokens, 512)
                            const T* k_pe,           // (tokens, 64)
                            const int* block_table,  // (batch, table_width)
                            const int* kv_lens,      // (batch,)
                            const int* cu_q,         // (batch + 1,)
                            const float* cos_sin,    // (positions, rotary_dim)
                            uint8_t* kv_cache,       // (pages, page_size, bytes of a row)
                            int tokens, int batch, int table_width, int page_bits, int rotary_dim) {
  using Row = CachedRow<Cached>;
  const TokenSlots slots = {.block_table = block_table,
                            .kv_lens = kv_lens,
                            .cu_q = cu_q,
                            .batch = batch,
                            .table_width = table_width,
                            .page_bits = page_bits};
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarpThreads) + warp_index();
  if (warp * kTokens >= tokens) return;
  const int first = static_cast<int>(warp) * kTokens, lane = lane_index();

  LanePart<T, kStyle> parts[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (first + i < tokens) parts[i].template load<Row::kPacked>(c, k_pe, first + i);
  }
  int64_t token_slots[kTokens];
  float cosines[kTokens], sines[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int token = min(first + i, tokens - 1), sequence = slots.sequence(token);
    const int position = slots.position(token, sequence);
    token_slots[i] = slots.slot(slots.page(sequence, position), position);
    cosines[i] = 1.0f, sines[i] = 0.0f;
    if (rotary_dim != 0) {
      const float* angles = cos_sin + static_cast<int64_t>(position) * kRope;
      cosines[i] = __ldg(angles + lane), sines[i] = __ldg(angles + kRope / 2 + lane);
    }
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (first + i >= tokens) break;
    const Row row(kv_cache, token_slots[i]);
    parts[i].store_latents(row);
    parts[i].store_rope(row, rotary_dim != 0, cosines[i], sines[i]);
  }
}

}  // namespace kernelcat
