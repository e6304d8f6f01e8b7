// 16 elements a thread, in two vectors of 8 elements that hold whole pairs of the rotation. Each
// byte is moved once.
#include <kernelcat/cache_scale.cuh>

namespace kernelcat {

constexpr int kThreadElements = 2 * kVector;

template <typename T>
__device__ __forceinline__ void unpack(const uint4 (&vectors)[2],
                                       float (&values)[kThreadElements]) {
  const T* elements = reinterpret_cast<const T*>(vectors);
#pragma unroll
  for (int i = 0; i < kThreadElements; ++i) values[i] = to_float(elements[i]);
}

// Rounds and stores values[0 .. 7] by one instruction (the compiler splits an assignment into
// several).
template <typename T>
__device__ __forceinline__ void store(T* address, const float* values) {
  if constexpr (sizeof(T) == 1) {
    __stwb(reinterpret_cast<uint2*>(address),
           uint2{pack_four_e4m3(values), pack_four_e4m3(values + 4)});
  } else {
    const auto pair = [&](int i) { return pack<T>(values[i], values[i + 1]); };
    __stwb(reinterpret_cast<uint4*>(address), uint4{pair(0), pair(2), pair(4), pair(6)});
  }
}

// Cosines and sines of the eight pairs of a thread.
struct Angles {
  float cosines[kVector], sines[kVector];

  // `cos_sin` points to the cosine of the thread's first pair; the sines are `half` floats further.
  __device__ __forceinline__ void load(const float* cos_sin, int half) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      *reinterpret_cast<float4*>(cosines + i) = __ldg(reinterpret_cast<const float4*>(cos_sin + i));
      *reinterpret_cast<float4*>(sines + i) =
          __ldg(reinterpret_cast<const float4*>(cos_sin + half + i));
    }
  }

  template <RopeStyle kStyle>
  __device__ __forceinline__ void rotate(float (&values)[kThreadElements]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float& first = values[kStyle == RopeStyle::kInterleaved ? 2 * i : i];
      float& second = values[kStyle == RopeStyle::kInterleaved ? 2 * i + 1 : i + kVector];
      const float x = first, y = second;
      first = x * cosines[i] - y * sines[i];
      second = y * cosines[i] + x * sines[i];
    }
  }
};

// The rows of a token are the heads of its keys, then of its values, then of its queries. head_dim
// / 16 threads take a row. A warp takes kUnroll times as many rows of one token as its lanes hold
// at once; it starts to load them before it looks up where the token goes. rotary_dim must be a
// multiple of 16.
template <typename T, typename Cached, int kHeadDim, RopeStyle kStyle, Scales kScales, int kThreads,
          int kUnroll>
__global__ void __launch_bounds__(kThreads)
    kv_write_vectorized(const T* q,              // (tokens, heads, head_dim)
                        const T* k,              // (tokens, kv_heads, head_dim)
                        const T* v,              // (tokens, kv_heads, head_dim)
                        const int* block_table,  // (batch, table_width)
                        const int* kv_lens,      // (batch,)
                        const int* cu_q,         // (batch + 1,)
                        const float* cos_sin,    // (positions, rotary_dim)
                        const float* k_scale,    // (1 or pages, kv_heads) or null
                        const float* v_scale,    // (1 or pages, kv_heads) or null
                        T* q_out,                // (tokens, heads, head_dim)
                        Cached* k_cache,         // (pages, page_size, kv_heads, head_dim)
                        Cached* v_cache,         // (pages, page_size, kv_heads, head_dim)
                        int tokens, int batch, int heads, int kv_heads, int table_width,
                        int page_bits, int rotary_dim) {
  constexpr int kRowThreads = kHeadDim / kThreadElements, kStep = kWarpThreads / kRowThreads;
  const TokenSlots slots = {.block_table = block_table,
                            .kv_lens = kv_lens,
                            .cu_q = cu_q,
                            .batch = batch,
                            .table_width = table_width,
                            .page_bits = page_bits};
  const int num_rows = 2 * kv_heads + heads;
  const int token_warps = ceil_div(num_rows, kStep * kUnroll);
  const int warp = blockIdx.x * (kThreads / kWarpThreads) + warp_index();
  const int token = warp / token_warps, first_row = warp % token_warps * (kStep * kUnroll);
  if (token >= tokens) return;
  const int64_t key_row = static_cast<int64_t>(token) * kv_heads;
  const int64_t query_row = static_cast<int64_t>(token) * heads - 2 * kv_heads;
  const auto row_at = [&](int i) { return first_row + i * kStep + lane_index() / kRowThreads; };

  // Columns of the thread's two vectors. Elements of Neox pairs are rotary_dim / 2 apart: the
  // vectors then hold the first and the second elements of the same pairs.
  const int row_thread = lane_index() % kRowThreads, half = rotary_dim / 2;
  const bool rotates = row_thread * kThreadElements < rotary_dim;
  const bool is_split = kStyle == RopeStyle::kNeox && rotates;
  const int low = row_thread * (is_split ? kVector : kThreadElements);
  const int high = low + (is_split ? half : kVector);

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

  const int sequence = slots.sequence(token), position = slots.position(token, sequence);
  const int page = first_row < 2 * kv_heads ? slots.page(sequence, position) : 0;
  Angles angles;
  if (rotates) {
    angles.load(cos_sin + static_cast<int64_t>(position) * rotary_dim + row_thread * kVector, half);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int row = row_at(i);
    if (row >= num_rows) break;
    const bool is_key = row < kv_heads, is_query = row >= 2 * kv_heads;
    float values[kThreadElements];
    unpack<T>(vectors[i], values);
    if (rotates && (is_key || is_query)) angles.rotate<kStyle>(values);
    if (is_query) {
      T* target = q_out + (query_row + row) * kHeadDim;
      store(target + low, values);
      store(target + high, values + kVector);
    } else {
      const int head = is_key ? row : row - kv_heads;
      const float inverse =
          inverse_scale<kScales>(is_key ? k_scale : v_scale, page, head, kv_heads);
#pragma unroll
      for (int j = 0; j < kThreadElements; ++j) values[j] *= inverse;
      const int64_t slot = slots.slot(page, position);
      Cached* target = (is_key ? k_cache : v_cache) + (slot * kv_heads + head) * kHeadDim;
      store(target + low, values);
      store(target + high, values + kVector);
    }
  }
}

}  // namespace kernelcat
