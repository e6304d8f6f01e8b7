// 16 elements a thread, in two vectors of 16 bytes that hold whole pairs; every byte is moved once.
#include "place.cuh"

namespace kernelcat {

constexpr int kVector = 8;  // elements in 16 bytes
constexpr int kHeld = 2 * kVector;

template <typename T>
__device__ __forceinline__ void unpack(const uint4 (&vectors)[2], float (&values)[kHeld]) {
  const T* elements = reinterpret_cast<const T*>(vectors);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) values[i] = to_float(elements[i]);
}

// Eight values, rounded, by one instruction: the compiler takes an assignment apart.
template <typename T>
__device__ __forceinline__ void store(T* address, const float* values) {
  if constexpr (sizeof(T) == 1) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = pack_e4m3(values[4 * i], values[4 * i + 1]);
      words[i] = low | static_cast<uint32_t>(pack_e4m3(values[4 * i + 2], values[4 * i + 3])) << 16;
    }
    __stwb(reinterpret_cast<uint2*>(address), uint2{words[0], words[1]});
  } else {
    const auto pair = [&](int i) { return pack<T>(values[i], values[i + 1]); };
    __stwb(reinterpret_cast<uint4*>(address), uint4{pair(0), pair(2), pair(4), pair(6)});
  }
}

// Cosines and sines of a thread's eight pairs.
struct Angles {
  float cosines[kVector], sines[kVector];

  __device__ __forceinline__ void load(const float* cos_sin, int half) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      *reinterpret_cast<float4*>(cosines + i) = __ldg(reinterpret_cast<const float4*>(cos_sin + i));
      *reinterpret_cast<float4*>(sines + i) =
          __ldg(reinterpret_cast<const float4*>(cos_sin + half + i));
    }
  }

  template <Style kStyle>
  __device__ __forceinline__ void turn(float (&values)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float& first = values[kStyle == Style::kInterleaved ? 2 * i : i];
      float& second = values[kStyle == Style::kInterleaved ? 2 * i + 1 : i + kVector];
      const float x = first, y = second;
      first = x * cosines[i] - y * sines[i];
      second = y * cosines[i] + x * sines[i];
    }
  }
};

// The rows of a token are its keys, values and queries, head by head. head_dim / 16 threads take a
// row, and a warp several rows of one token: kUnroll times as many as it moves at once. They are
// asked for before it is known where the token goes. rotary_dim is a multiple of 16.
template <typename T, typename Cached, int kHeadDim, Style kStyle, Scales kScales, int kThreads,
          int kUnroll>
__global__ void __launch_bounds__(kThreads)
    kv_write_vectorized(const T* q,  // (tokens, heads, head_dim)
                        const T* k,  // (tokens, kv_heads, head_dim)
                        const T* v, const int* block_table, const int* kv_lens, const int* cu_q,
                        const float* cos_sin,  // (positions, rotary_dim)
                        const float* k_scale,  // (1 or pages, kv_heads)
                        const float* v_scale,
                        T* q_out,         // as q
                        Cached* k_cache,  // (pages, page_size, kv_heads, head_dim)
                        Cached* v_cache, int tokens, int batch, int heads, int kv_heads,
                        int table_width, int page_bits, int rotary_dim) {
  constexpr int kLanes = kHeadDim / kHeld, kStep = kWarpThreads / kLanes;
  const Places places = {block_table, kv_lens, cu_q, batch, table_width, page_bits};
  const int num_rows = 2 * kv_heads + heads, num_units = ceil_div(num_rows, kStep * kUnroll);
  const int warp = blockIdx.x * (kThreads / kWarpThreads) + warp_index();
  const int token = warp / num_units, first_row = warp % num_units * (kStep * kUnroll);
  if (token >= tokens) return;
  const int64_t key_row = static_cast<int64_t>(token) * kv_heads;
  const int64_t query_row = static_cast<int64_t>(token) * heads - 2 * kv_heads;
  const auto row_at = [&](int i) { return first_row + i * kStep + lane_index() / kLanes; };

  // Where in a row a thread's vectors begin: of turning elements both halves of its pairs.
  const int lane = lane_index() % kLanes, half = rotary_dim / 2;
  const bool turns = lane * kHeld < rotary_dim;
  const bool apart = kStyle == Style::kNeox && turns;
  const int low = lane * (apart ? kVector : kHeld), high = low + (apart ? half : kVector);

  uint4 vectors[kUnroll][2] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int row = row_at(i);
    const T* source = k + (key_row + row) * kHeadDim;
    if (row >= kv_heads) source = v + (key_row + row - kv_heads) * kHeadDim;
    if (row >= 2 * kv_heads) source = q + (query_row + row) * kHeadDim;
    if (row < num_rows) {
      vectors[i][0] = __ldcs(reinterpret_cast<const uint4*>(source + low));
      vectors[i][1] = __ldcs(reinterpret_cast<const uint4*>(source + high));
    }
  }

  const int s = sequence_of(token, cu_q, batch), position = places.position(token, s);
  const int page = first_row < 2 * kv_heads ? places.page(s, position) : 0;
  Angles angles;
  if (turns) {
    angles.load(cos_sin + static_cast<int64_t>(position) * rotary_dim + lane * kVector, half);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int row = row_at(i);
    if (row >= num_rows) break;
    const bool is_key = row < kv_heads, is_query = row >= 2 * kv_heads;
    float values[kHeld];
    unpack<T>(vectors[i], values);
    if (turns && (is_key || is_query)) angles.turn<kStyle>(values);
    if (is_query) {
      T* target = q_out + (query_row + row) * kHeadDim;
      store(target + low, values);
      store(target + high, values + kVector);
    } else {
      const int head = is_key ? row : row - kv_heads;
      const float inverse = inverse_of<kScales>(is_key ? k_scale : v_scale, page, head, kv_heads);
#pragma unroll
      for (int j = 0; j < kHeld; ++j) values[j] *= inverse;
      const int64_t slot = places.slot(page, position);
      Cached* target = (is_key ? k_cache : v_cache) + (slot * kv_heads + head) * kHeadDim;
      store(target + low, values);
      store(target + high, values + kVector);
    }
  }
}

}  // namespace kernelcat
