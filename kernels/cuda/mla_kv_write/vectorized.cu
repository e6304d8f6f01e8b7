// A warp a token: 16 latent values a lane, in vectors of 16 bytes, and a pair of the rotated part.
#include "row.cuh"

namespace kernelcat {

constexpr int kVector = 8;                    // elements in 16 bytes
constexpr int kVectors = 2;                   // of a lane
constexpr int kHeld = kVectors * kVector;     // latent values of a lane
constexpr int kScaleLanes = kScaled / kHeld;  // that share a scale
static_assert(kHeld * kWarpThreads == kLatent && kRope == 2 * kWarpThreads);

// What a lane has of a token, before it is known where the token goes.
template <typename T, RopeStyle kStyle>
struct Piece {
  uint4 vectors[kVectors];
  T pair[2];

  // A packed row's bytes lie side by side in a lane, other rows' vectors side by side in the warp.
  template <bool kPacked>
  static __device__ __forceinline__ int column(int vector) {
    return kPacked ? lane_index() * kHeld + vector * kVector
                   : (vector * kWarpThreads + lane_index()) * kVector;
  }

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
};

// 16 values as float8 bytes.
__device__ __forceinline__ uint4 quantized(const float (&values)[kHeld], float inverse) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* four = values + 4 * i;
    const uint32_t low = pack_e4m3(four[0] * inverse, four[1] * inverse);
    words[i] = low | static_cast<uint32_t>(pack_e4m3(four[2] * inverse, four[3] * inverse)) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// A warp takes kTokens neighbouring tokens, and asks for all of them before it looks the first up.
template <typename T, typename Cached, RopeStyle kStyle, int kThreads, int kTokens>
__global__ void __launch_bounds__(kThreads)
    mla_kv_write_vectorized(const T* c,              // (tokens, 512)
                            const T* k_pe,           // (tokens, 64)
                            const int* block_table,  // (batch, table_width)
                            const int* kv_lens,      // (batch)
                            const int* cu_q,         // (batch + 1)
                            const float* cos_sin,    // (positions, rotary_dim)
                            uint8_t* kv_cache,       // (pages, page_size, bytes of a row)
                            int tokens, int batch, int table_width, int page_bits, int rotary_dim) {
  constexpr bool kPacked = CachedRow<Cached>::kPacked;
  const TokenSlots places = {block_table, kv_lens, cu_q, batch, table_width, page_bits};
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarpThreads) + warp_index();
  if (warp * kTokens >= tokens) return;
  const int first = static_cast<int>(warp) * kTokens, lane = lane_index();

  Piece<T, kStyle> pieces[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (first + i < tokens) pieces[i].template load<kPacked>(c, k_pe, first + i);
  }
  int64_t slots[kTokens];
  float cosines[kTokens], sines[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int token = min(first + i, tokens - 1), s = places.sequence(token);
    const int position = places.position(token, s);
    slots[i] = places.slot(places.page(s, position), position);
    cosines[i] = 1.0f, sines[i] = 0.0f;
    if (rotary_dim != 0) {
      const float* angles = cos_sin + static_cast<int64_t>(position) * kRope;
      cosines[i] = __ldg(angles + lane), sines[i] = __ldg(angles + kRope / 2 + lane);
    }
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (first + i >= tokens) break;
    const Piece<T, kStyle>& piece = pieces[i];
    const CachedRow<Cached> row = CachedRow<Cached>::at(kv_cache, slots[i]);
    if constexpr (kPacked) {
      float values[kHeld], amax = 0.0f;
      const T* elements = reinterpret_cast<const T*>(piece.vectors);
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        values[j] = to_float(elements[j]);
        amax = fmaxf(amax, fabsf(values[j]));
      }
      const float scale = scale_of(max_of_lanes<kScaleLanes>(amax));
      reinterpret_cast<uint4*>(row.begin)[lane] = quantized(values, inverse_of_power(scale));
      if (lane % kScaleLanes == 0) row.scales()[lane / kScaleLanes] = scale;
    } else {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        T* target = reinterpret_cast<T*>(row.begin) + Piece<T, kStyle>::template column<false>(j);
        *reinterpret_cast<uint4*>(target) = piece.vectors[j];
      }
    }
    float2 pair = {to_float(piece.pair[0]), to_float(piece.pair[1])};
    if (rotary_dim != 0) pair = turned(pair, cosines[i], sines[i]);
    T* target = reinterpret_cast<T*>(row.rope()) + first_of_pair<kStyle>(lane);
    if constexpr (kStyle == RopeStyle::kInterleaved) {
      *reinterpret_cast<uint32_t*>(target) = pack<T>(pair.x, pair.y);
    } else {
      target[0] = from_float<T>(pair.x);
      target[kRope / 2] = from_float<T>(pair.y);
    }
  }
}

}  // namespace kernelcat
