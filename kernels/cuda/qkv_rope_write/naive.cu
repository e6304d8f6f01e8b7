// A thread block for each head of a token: it normalizes the token's row of x, multiplies the row
// by the head's weights, a warp for each row of them, and rotates and stores the head.
#include <kernelcat/cache_scale.cuh>
#include <kernelcat/rope_element.cuh>
#include <kernelcat/warp_sum.cuh>

namespace kernelcat {

constexpr int kNumWarps = 8;

// The sum of all threads' `value`, for each of them; `sums` (kNumWarps,) is in shared memory.
__device__ __forceinline__ float block_sum(float value, float* sums) {
  const int warp = warp_index();
  value = warp_sum(value);
  if (lane_index() == 0) sums[warp] = value;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < kNumWarps; ++i) total += sums[i];
  return total;
}

// Fills `a` (hidden,) in shared memory with the normalized row `x` (hidden,) of a token. `sums`
// (kNumWarps,) is in shared memory too.
template <typename T>
__device__ __forceinline__ void normalize(const T* x, const T* norm_weight, float* a, float* sums,
                                          int hidden, float eps) {
  float squares = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float value = to_float(x[i]);
    squares += value * value;
  }
  const float root = sqrtf(block_sum(squares, sums) / max(hidden, 1) + eps);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    a[i] = to_float(from_float<T>(to_float(x[i]) / root * to_float(norm_weight[i])));
  }
  __syncthreads();
}

// Fills `z` (head_dim,) in shared memory with w @ a + bias; `w` (head_dim, hidden), `bias`
// (head_dim,) or null.
template <typename T, int kHeadDim>
__device__ __forceinline__ void project(const T* w, const T* bias, const float* a, float* z,
                                        int hidden) {
  for (int dim = warp_index(); dim < kHeadDim; dim += kNumWarps) {
    const T* row = w + static_cast<int64_t>(dim) * hidden;
    float sum = 0.0f;
    for (int i = lane_index(); i < hidden; i += kWarpThreads)
      sum = fmaf(to_float(row[i]), a[i], sum);
    sum = warp_sum(sum);
    if (lane_index() == 0) z[dim] = sum + (bias == nullptr ? 0.0f : to_float(bias[dim]));
  }
  __syncthreads();
}

template <typename T, typename Cached, int kHeadDim, RopeStyle kStyle, Scales kScales>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads)
    qkv_rope_write_naive(const T* x,              // (tokens, hidden)
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
  extern __shared__ uint8_t dynamic_shared[];
  float* z = reinterpret_cast<float*>(dynamic_shared);  // (head_dim,)
  float* sums = z + kHeadDim;                           // (kNumWarps,)
  float* a = sums + kNumWarps;                          // (hidden,)
  const TokenSlots slots = {.block_table = block_table,
                            .kv_lens = kv_lens,
                            .cu_q = cu_q,
                            .batch = batch,
                            .table_width = table_width,
                            .page_bits = page_bits};
  const int rows = heads + 2 * kv_heads;  // heads of a token
  const int64_t token = blockIdx.x / rows;
  const int row = blockIdx.x % rows;
  const bool is_query = row < heads, is_key = !is_query && row < heads + kv_heads;
  const int head = is_query ? row : (row - heads) % kv_heads;
  normalize(x + token * hidden, norm_weight, a, sums, hidden, eps);
  const T* w = is_query ? wq : is_key ? wk : wv;
  const T* bias = is_query ? bq : is_key ? bk : bv;
  project<T, kHeadDim>(w + static_cast<int64_t>(head) * kHeadDim * hidden,
                       bias == nullptr ? nullptr : bias + head * kHeadDim, a, z, hidden);

  const int sequence = slots.sequence(static_cast<int>(token));
  const int position = slots.position(static_cast<int>(token), sequence);
  const float* angles = cos_sin + static_cast<int64_t>(position) * rotary_dim;
  if (is_query) {
    T* target = q_out + (token * heads + head) * kHeadDim;
    for (int dim = threadIdx.x; dim < kHeadDim; dim += blockDim.x) {
      target[dim] = from_float<T>(rotated<kStyle>(z, dim, angles, rotary_dim));
    }
    return;
  }
  const int page = slots.page(sequence, position);
  const float inverse = inverse_scale<kScales>(is_key ? k_scale : v_scale, page, head, kv_heads);
  Cached* cache = is_key ? k_cache : v_cache;
  Cached* target = cache + (slots.slot(page, position) * kv_heads + head) * kHeadDim;
  for (int dim = threadIdx.x; dim < kHeadDim; dim += blockDim.x) {
    const float value = rotated<kStyle>(z, dim, angles, is_key ? rotary_dim : 0);
    target[dim] = from_float<Cached>(value * inverse);
  }
}

}  // namespace kernelcat
