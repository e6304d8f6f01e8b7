// Decode over a paged cache where latency decides: few tokens, or a window, or few sequences.
//
// Keys and values go from global memory into registers, in the layout in which mma.sync takes them:
// no copy engine, no stages and no barriers lie between the block table and the first product. All
// loads of a KV tile are in flight at once, and warps wait for each other only once, at the end.
// What does not depend on the length of the sequence (the block table's row, the sinks) is loaded
// while the length is. As in paged_attn/tma, products are transposed, and the thread blocks of a
// cluster divide the tokens of a sequence and exchange their partial results (flash-decoding)
// through distributed shared memory.
//
// barrier    | who arrives (how many)                             | who waits   | for what
// -----------|----------------------------------------------------|-------------|------------------
// inbox_full | thread 0 (1), with bytes that all thread blocks of | all threads | the cluster's
//            | the cluster store                                  |             | parts of its rows
#include "register_warp.cuh"
#include "tile_attention.cuh"

namespace kernelcat {

template <typename Kind, int kGroup, int kRowTiles, int kTokens, int kNumWarps, int kClusterSize,
          int kBlocksPerSm>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads, kBlocksPerSm) paged_attn_registers(
    const typename Kind::T* q,             // (tokens, heads, head_dim)
    const typename Kind::Cached* k_cache,  // (pages, page_size, kv_heads, head_dim)
    const typename Kind::Cached* v_cache,  // (pages, page_size, kv_heads, head_dim)
    const int* block_table,                // (batch, table_width)
    const int* kv_lens,                    // (batch,)
    const int* cu_q,                       // (batch + 1,)
    const float* sinks,                    // (heads,) or null
    const float* k_scale,                  // (1, kv_heads) or null
    const float* v_scale,                  // (1, kv_heads) or null
    const float8_e4m3fn* k_block_scale,    // null
    const float8_e4m3fn* v_block_scale,    // null
    typename Kind::T* out,                 // (tokens, heads, head_dim)
    float* lse,                            // (tokens, heads)
    int batch, int heads, int kv_heads, int table_width, int window, float sm_scale,
    float softcap) {
  using Warp = RegisterWarp<Kind, kRowTiles, kTokens>;
  using Kernel = TileAttention<Kind, Warp, kGroup, kNumWarps, kClusterSize>;
  __shared__ typename Kernel::Shared shared;
  const AttentionArgs<Kind> args = {.q = q,
                                    .k_cache = k_cache,
                                    .v_cache = v_cache,
                                    .block_table = block_table,
                                    .kv_lens = kv_lens,
                                    .cu_q = cu_q,
                                    .sinks = sinks,
                                    .k_scale = k_scale,
                                    .v_scale = v_scale,
                                    .k_block_scale = k_block_scale,
                                    .v_block_scale = v_block_scale,
                                    .out = out,
                                    .lse = lse,
                                    .batch = batch,
                                    .heads = kv_heads * kGroup,  // a known multiple of kv_heads
                                    .kv_heads = kv_heads,
                                    .table_width = table_width,
                                    .window = window,
                                    .sm_scale = sm_scale,
                                    .softcap = softcap};
  const int rank = kClusterSize > 1 ? cluster_rank() : 0;
  const Kernel kernel = {
      .args = args, .shared = shared, .warp_idx = warp_index(), .lane = lane_index(), .rank = rank};
  kernel.run([] {});
}

}  // namespace kernelcat
