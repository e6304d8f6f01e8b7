// Decode over a paged cache where latency decides, with room for the next launch.
//
// As in paged_attn/registers, nothing lies between the block table and the first product, and warps
// wait for each other only once, at the end. But keys and values come into shared memory, into a
// stage of each warp's own, by asynchronous copies of whole rows. A thread then needs half of the
// registers, so the thread blocks of the next launch have room beside these: they start, look their
// table up, and with kAhead ask for their keys and values, before this launch has ended.
//
// barrier    | who arrives (how many)                             | who waits   | for what
// -----------|----------------------------------------------------|-------------|------------------
// inbox_full | thread 0 (1), with bytes that all thread blocks of | all threads | the cluster's
//            | the cluster store                                  |             | parts of its rows
#include "page_prefetch.cuh"
#include "staged_warp.cuh"
#include "tile_attention.cuh"

namespace kernelcat {

template <typename Kind, int kGroup, int kRowTiles, int kTokens, int kNumWarps, int kClusterSize,
          int kBlocksPerSm, bool kAhead, int kSharedBytes>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads, kBlocksPerSm) paged_attn_staged(
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
    int batch, int heads, int kv_heads, int table_width, int window, float sm_scale, float softcap,
    int num_pages, int num_queries) {
  using Warp = StagedWarp<Kind, kRowTiles, kTokens>;
  using Kernel = TileAttention<Kind, Warp, kGroup, kNumWarps, kClusterSize>;
  static_assert(sizeof(typename Kernel::Shared) <= kSharedBytes);
  extern __shared__ uint4 dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(dynamic_shared);
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
  kernel.run([&] {
    if constexpr (kAhead) {
      const PagePrefetch<Kind, kGroup> prefetch = {
          .args = args, .num_pages = num_pages, .num_queries = num_queries};
      const int kv_head = blockIdx.y, sequence_idx = blockIdx.z;
      prefetch.pages(sequence_idx, kv_head * kClusterSize + rank, kv_heads * kClusterSize);
      if (rank == 0) prefetch.queries(sequence_idx, kv_head);
      __syncwarp();
    }
  });
}

}  // namespace kernelcat
