// Decode over a paged cache on Hopper: every warp streams pages of its own by TMA.
//
// The query tokens of a sequence and the heads that share a key-value head are the 8 or 16 columns
// of the products, the cached tokens their rows: scores are keys @ queries^T, the output is
// values^T @ weights^T, so that mma.sync wastes nothing on 8 query rows. A warp has a ring of its
// own. Each lane loads one box of one stage, whose page it looks up a whole round ahead, so warps
// wait for each other only once, at the end. Where a head's row is shorter than 128 bytes a thread
// block may take two neighbouring heads, whose rows are contiguous in memory. The thread blocks of
// a cluster divide the tokens of a sequence and exchange their partial results (flash-decoding)
// through distributed shared memory.
//
// barrier           | who arrives (how many)                  | who waits    | for what
// ------------------|-----------------------------------------|--------------|---------------------
// full[warp][stage] | a lane of the warp (1), with bytes of   | the warp     | a KV tile has landed
//                   | TMA                                     |              |
// inbox_full        | thread 0 (1), with bytes that all       | all threads  | the cluster's parts
//                   | thread blocks of the cluster store      |              | of its rows are here
//
// Stages have no empty barriers: the warp that reads a stage also loads it, after __syncwarp().
#include "decode_attention.cuh"

namespace kernelcat {

template <typename Kind, int kHeads, int kRowTiles, int kTokens, int kNumWarps, int kNumStages,
          int kClusterSize, int kBlocksPerSm>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads, kBlocksPerSm) paged_attn_tma(
    const __grid_constant__ TensorMap map_k,  // (slots, kv_heads / kHeads, kHeads * head_dim)
    const __grid_constant__ TensorMap map_v,  // (slots, kv_heads / kHeads, kHeads * head_dim)
    const typename Kind::T* q,                // (tokens, heads, head_dim)
    const typename Kind::Cached* k_cache,     // (pages, page_size, kv_heads, head_dim)
    const typename Kind::Cached* v_cache,     // (pages, page_size, kv_heads, head_dim)
    const int* block_table,                   // (batch, table_width)
    const int* kv_lens,                       // (batch,)
    const int* cu_q,                          // (batch + 1,)
    const float* sinks,                       // (heads,) or null
    const float* k_scale,                     // (1 or pages, kv_heads) or null
    const float* v_scale,                     // (1 or pages, kv_heads) or null
    const float8_e4m3fn* k_block_scale,       // (pages, page_size, kv_heads, head_dim / 16) or null
    const float8_e4m3fn* v_block_scale,       // (pages, page_size, kv_heads, head_dim / 16) or null
    typename Kind::T* out,                    // (tokens, heads, head_dim)
    float* lse,                               // (tokens, heads)
    int batch, int heads, int kv_heads, int table_width, int window, float sm_scale, float softcap,
    int num_slots) {
  using Kernel =
      DecodeAttention<Kind, kHeads, kRowTiles, kTokens, kNumWarps, kNumStages, kClusterSize>;
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;  // to a swizzle atom
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(dynamic_shared + padding);
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
                                    .heads = heads,
                                    .kv_heads = kv_heads,
                                    .table_width = table_width,
                                    .window = window,
                                    .sm_scale = sm_scale,
                                    .softcap = softcap};
  const int rank = kClusterSize > 1 ? cluster_rank() : 0;
  const Kernel kernel = {.args = args,
                         .map_k = map_k,
                         .map_v = map_v,
                         .num_slots = num_slots,
                         .shared = shared,
                         .warp_idx = warp_index(),
                         .lane = lane_index(),
                         .rank = rank};
  kernel.run();
}

}  // namespace kernelcat
