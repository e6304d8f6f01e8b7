// Attention over a paged cache for decode and prefill alike, by mma.sync from stages that cp.async
// fills.
//
// The query tokens of a sequence and the heads that share a key-value head are the rows of one
// product, so that keys and values are read once for all of them. Warps keep the softmax of their
// rows in registers (FlashAttention-2). With few rows, the warps of a thread block divide the
// tokens of a KV tile among them, and thread blocks the tokens of a sequence (flash-decoding).
// Every thread block gets the same number of KV tiles, whatever the lengths (FlashMLA,
// FlashInfer), and its copies run ahead across the borders of sequences and heads.
#include "split_attention.cuh"

namespace kernelcat {

template <typename Kind, int BLOCK_M, int BLOCK_N, int kNumWarps, int kNumStages, int kBlocksPerSm,
          int kBorderItems = 0>
__global__ void __launch_bounds__(kNumWarps* kWarpThreads, kBlocksPerSm) paged_attn_split(
    const typename Kind::T* q,             // (tokens, heads, head_dim)
    const typename Kind::Cached* k_cache,  // (pages, page_size, kv_heads, head_dim; NVFP4: / 2)
    const typename Kind::Cached* v_cache,  // (pages, page_size, kv_heads, head_dim; NVFP4: / 2)
    const int* block_table,                // (batch, table_width)
    const int* kv_lens,                    // (batch,)
    const int* cu_q,                       // (batch + 1,)
    const float* sinks,                    // (heads,) or null
    const float* k_scale,                  // (1 or pages, kv_heads) or null
    const float* v_scale,                  // (1 or pages, kv_heads) or null
    const float8_e4m3fn* k_block_scale,    // (pages, page_size, kv_heads, head_dim / 16) or null
    const float8_e4m3fn* v_block_scale,    // (pages, page_size, kv_heads, head_dim / 16) or null
    typename Kind::T* out,                 // (tokens, heads, head_dim)
    float* lse,                            // (tokens, heads)
    float* partials,                       // PartialResults::slots
    uint32_t* counters,                    // PartialResults::counters
    int batch, int heads, int kv_heads, int table_width, int window, float sm_scale,
    float softcap) {
  using Kernel = SplitAttention<Kind, BLOCK_M, BLOCK_N, kNumWarps, kNumStages, kBorderItems>;
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  static __shared__ typename Kernel::Shared shared;
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
  Kernel kernel = {.args = args,
                   .partials = {.slots = partials, .counters = counters},
                   .list = {.kv_lens = kv_lens,
                            .cu_q = cu_q,
                            .batch = batch,
                            .kv_heads = kv_heads,
                            .group = args.group(),
                            .window = window},
                   .stages = dynamic_shared,
                   .shared = shared};
  kernel.run();
}

}  // namespace kernelcat
