// One warp a head of a token's keys, values or queries: lanes side by side on head_dim, one element
// at a time, each with its partner.
#include "place.cuh"

namespace kernelcat {

// Element `dim` of the head at `x`, turned by the cosines and sines at `cos_sin`.
template <typename T, Style kStyle>
__device__ __forceinline__ float turned(const T* x, int dim, const float* cos_sin, int rotary_dim) {
  const float value = to_float(x[dim]);
  if (dim >= rotary_dim) return value;
  const int half = rotary_dim / 2;
  const bool is_first = kStyle == Style::kInterleaved ? dim % 2 == 0 : dim < half;
  const int pair = kStyle == Style::kInterleaved ? dim / 2 : is_first ? dim : dim - half;
  const int distance = kStyle == Style::kInterleaved ? 1 : half;
  const float partner = to_float(x[is_first ? dim + distance : dim - distance]);
  const float sine = cos_sin[half + pair];
  return value * cos_sin[pair] + partner * (is_first ? -sine : sine);
}

template <typename T, typename Cached, int kHeadDim, Style kStyle, Scales kScales>
__global__ void __launch_bounds__(128)
    kv_write_naive(const T* q,  // (tokens, heads, head_dim)
                   const T* k,  // (tokens, kv_heads, head_dim)
                   const T* v, const int* block_table, const int* kv_lens, const int* cu_q,
                   const float* cos_sin,  // (positions, rotary_dim)
                   const float* k_scale,  // (1 or pages, kv_heads)
                   const float* v_scale,
                   T* q_out,         // as q
                   Cached* k_cache,  // (pages, page_size, kv_heads, head_dim)
                   Cached* v_cache, int tokens, int batch, int heads, int kv_heads, int table_width,
                   int page_bits, int rotary_dim) {
  const Places places = {block_table, kv_lens, cu_q, batch, table_width, page_bits};
  const int rows = 2 * kv_heads + heads, lane = lane_index();
  const int64_t num_rows = static_cast<int64_t>(tokens) * rows;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t i = begin + warp_index(); i < num_rows; i += step) {
    const int64_t token = i / rows;
    const int row = static_cast<int>(i % rows);
    const int s = sequence_of(static_cast<int>(token), cu_q, batch);
    const int position = places.position(static_cast<int>(token), s);
    const float* angles = cos_sin + static_cast<int64_t>(position) * rotary_dim;
    if (row >= 2 * kv_heads) {
      const int64_t head = token * heads + row - 2 * kv_heads;
      for (int dim = lane; dim < kHeadDim; dim += kWarpThreads) {
        const float value = turned<T, kStyle>(q + head * kHeadDim, dim, angles, rotary_dim);
        q_out[head * kHeadDim + dim] = from_float<T>(value);
      }
      continue;
    }
    const int page = places.page(s, position);
    const bool is_key = row < kv_heads;
    const int head = is_key ? row : row - kv_heads;
    const float inverse = inverse_of<kScales>(is_key ? k_scale : v_scale, page, head, kv_heads);
    const T* source = (is_key ? k : v) + (token * kv_heads + head) * kHeadDim;
    const int64_t slot = places.slot(page, position);
    Cached* target = (is_key ? k_cache : v_cache) + (slot * kv_heads + head) * kHeadDim;
    for (int dim = lane; dim < kHeadDim; dim += kWarpThreads) {
      const float value = turned<T, kStyle>(source, dim, angles, is_key ? rotary_dim : 0);
      target[dim] = from_float<Cached>(value * inverse);
    }
  }
}

}  // namespace kernelcat
