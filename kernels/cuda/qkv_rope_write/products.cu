// For tens of tokens, each thread block by itself: see product_tile.cuh.
#include "product_tile.cuh"

namespace kernelcat {

template <typename T, typename Cached, int kHeadDim, RopeStyle kStyle, Scales kScales, int kTokens,
          int kNumStages,
          typename Tile = ProductTile<T, Cached, kHeadDim, kStyle, kScales, kTokens, kNumStages>>
__global__ void __launch_bounds__(Tile::kNumThreads,
                                  2) qkv_rope_write_products(  // see ProductMaps, ProductArrays
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_wq,
    const __grid_constant__ TensorMap map_wk, const __grid_constant__ TensorMap map_wv,
    const int* block_table, const int* kv_lens, const int* cu_q, const float* cos_sin, const T* bq,
    const T* bk, const T* bv, const float* k_scale, const float* v_scale, T* q_out, Cached* k_cache,
    Cached* v_cache, float* partials, uint32_t* counters, int tokens, int batch, int heads,
    int kv_heads, int table_width, int page_bits, int rotary_dim, int hidden, int num_splits) {
  const ProductMaps maps = {map_a, map_wq, map_wk, map_wv};
  const ProductArrays<T, Cached> arrays = {
      block_table, kv_lens,  cu_q,        cos_sin,   bq,         bk,       bv,        k_scale,
      v_scale,     q_out,    k_cache,     v_cache,   partials,   counters, tokens,    batch,
      heads,       kv_heads, table_width, page_bits, rotary_dim, hidden,   num_splits};
  multiply_heads<Tile>(maps, arrays);
}

}  // namespace kernelcat
