// Attention of many query tokens over a paged cache on Hopper: one warp loads keys and values by
// TMA, page by page, into a ring each; two or three warpgroups multiply by wgmma, 64 rows each.
//
// A warpgroup starts the scores of a tile together with the weighted values of the tile before, and
// works on the softmax while the tensor cores finish. Warpgroups take turns, so that the softmax of
// one runs beside the products of another (FlashAttention-3). The thread blocks are persistent: the
// next queries and keys are loaded while the last rows are stored.
//
// barrier             | who arrives (how many)            | who waits     | for what
// --------------------|-----------------------------------|---------------|----------------------
// queries_full        | producer (1), with bytes of TMA   | all consumers | queries have landed,
// and
//                     |                                   |               | row_tile says whose
// queries_empty       | consumer warps (kConsumerWarps)   | producer      | queries have been read
// keys_full[stage]    | producer (1), with bytes of TMA   | all consumers | keys have landed, the
//                     | of the whole cluster              |               | parts of all loaders
// keys_empty[stage]   | consumer warps of the cluster     | producer      | keys have been read in
//                     | (kConsumerWarps * kClusterSize)   |               | the whole cluster
// values_full[stage]  | as keys_full                      | all consumers | values have landed
// values_empty[stage] | as keys_empty                     | producer      | values have been read
// kTurnBarrier + w    | the warpgroup before w (128), and | warpgroup w   | its turn to start its
// (named)             | w itself (128)                    |               | products
// kConsumersBarrier   | all consumers (kConsumerThreads)  | all consumers | unused slots have been
// (named)             |                                   |               | cleared
#include "prefill_consumer.cuh"
#include "prefill_producer.cuh"

namespace kernelcat {

template <typename Kind, int BLOCK_M, int BLOCK_N, int kNumStages, int kClusterSize,
          typename Tile = PrefillTile<Kind, BLOCK_M, BLOCK_N, kNumStages, kClusterSize>>
__global__ void __launch_bounds__(Tile::kNumThreads, 1) paged_attn_wgmma(
    const __grid_constant__ TensorMap map_q,  // (tokens, kv_heads, group, head_dim)
    const __grid_constant__ TensorMap map_k,  // (slots, kv_heads, head_dim)
    const __grid_constant__ TensorMap map_v,  // (slots, kv_heads, head_dim)
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
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t padding = -shared_address(dynamic_shared) & 1023;  // to a swizzle atom
  auto& shared = *reinterpret_cast<PrefillShared<Tile>*>(dynamic_shared + padding);
  if (threadIdx.x == 0) {
    prefetch_map(map_q);
    prefetch_map(map_k);
    prefetch_map(map_v);
    shared.queries_full.init(1);
    shared.queries_empty.init(Tile::kConsumerWarps);
    for (int i = 0; i < kNumStages; ++i) {
      shared.keys_full[i].init(1);
      shared.values_full[i].init(1);
      shared.keys_empty[i].init(Tile::kConsumerWarps * kClusterSize);
      shared.values_empty[i].init(Tile::kConsumerWarps * kClusterSize);
    }
    fence_barrier_init();
  }
  if constexpr (kClusterSize > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }

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
  const int warpgroup = warp_index() / 4;
  if (warpgroup == Tile::kNumConsumers) {
    decrease_registers<Tile::kProducerRegisters>();
    if (warp_index() % 4 == 0) {
      const PrefillProducer<Tile> producer = {.shared = shared,
                                              .map_q = map_q,
                                              .map_k = map_k,
                                              .map_v = map_v,
                                              .block_table = block_table,
                                              .table_width = table_width,
                                              .num_slots = num_slots,
                                              .group = args.group(),
                                              .rank = rank};
      producer.run(
          PrefillSchedule<Tile>(kv_lens, cu_q, batch, kv_heads, args.group(), window, rank));
    }
  } else {
    increase_registers<Tile::kConsumerRegisters>();
    const PrefillConsumer<Tile> consumer = {.shared = shared, .args = args, .warpgroup = warpgroup};
    consumer.run();
  }
  // A thread block must not exit while others of the cluster may still release its stages.
  if constexpr (kClusterSize > 1) cluster_sync();
}

}  // namespace kernelcat
