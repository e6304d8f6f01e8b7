// One warp for each head of a token's keys, values or queries: neighbouring lanes take neighbouring
// elements of head_dim, each with its partner in the rotation.
#include <kernelcat/cache_scale.cuh>
#include <kernelcat/rope_element.cuh>

namespace kernelcat {

template <typename T, typename Cached, int kHeadDim, RopeStyle kStyle, Scales kScales>
__global__ void __launch_bounds__(128)
    kv_write_naive(const T* q,              // (tokens, heads, head_dim)
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
                   int tokens, int batch, int heads, int kv_heads, int table_width, int page_bits,
                   int rotary_dim) {
  const TokenSlots slots = {.block_table = block_table,
                            .kv_lens = kv_lens,
                            .cu_q = cu_q,
                            .batch = batch,
                            .table_width = table_width,
                            .page_bits = page_bits};
  const int rows = 2 * kv_heads + heads, lane = lane_index();  // rows of a token
  const int64_t num_rows = static_cast<int64_t>(tokens) * rows;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t i = begin + warp_index(); i < num_rows; i += step) {
    const int64_t token = i / rows;
    const int row = static_cast<int>(i % rows);
    const int sequence = slots.sequence(static_cast<int>(token));
    const int position = slots.position(static_cast<int>(token), sequence);
    const float* angles = cos_sin + static_cast<int64_t>(position) * rotary_dim;
    if (row >= 2 * kv_heads) {
      const int64_t head = token * heads + row - 2 * kv_heads;
      for (int dim = lane; dim < kHeadDim; dim += kWarpThreads) {
        const float value = rotated<kStyle>(q + head * kHeadDim, dim, angles, rotary_dim);
        q_out[head * kHeadDim + dim] = from_float<T>(value);
      }
      continue;
    }
    const int page = slots.page(sequence, position);
    const bool is_key = row < kv_heads;
    const int head = is_key ? row : row - kv_heads;
    const float inverse = inverse_scale<kScales>(is_key ? k_scale : v_scale, page, head, kv_heads);
    const T* source = (is_key ? k : v) + (token * kv_heads + head) * kHeadDim;
    const int64_t slot = slots.slot(page, position);
    Cached* target = (is_key ? k_cache : v_cache) + (slot * kv_heads + head) * kHeadDim;
    for (int dim = lane; dim < kHeadDim; dim += kWarpThreads) {
      const float value = rotated<kStyle>(source, dim, angles, is_key ? rotary_dim : 0);
      target[dim] = from_float<Cached>(value * inverse);
    }
  }
}

}  // namespace kernelcat
