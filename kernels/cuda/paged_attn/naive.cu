// One warp for each query token and head: neighbouring lanes take neighbouring elements of
// head_dim, keys come one after another, and the online softmax is rescaled at each of them.
#include <kernelcat/sequences.cuh>
#include <kernelcat/softmax.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/warp_sum.cuh>

#include "attention.cuh"

namespace kernelcat {

// Element `column` of row `row` of a cache seen as (rows, head_dim).
template <typename Kind>
__device__ __forceinline__ float cached_value(const typename Kind::Cached* cache,
                                              const float8_e4m3fn* block_scale, int64_t row,
                                              int column) {
  const int64_t index = row * Kind::kHeadDim + column;
  if constexpr (kIsNvfp4<typename Kind::Cached>) {
    return to_float(cache[index / 2], column % 2) * to_float(block_scale[index / kNvfp4Block]);
  } else {
    return to_float(cache[index]);
  }
}

template <typename Kind>
__device__ __forceinline__ void attend(const AttentionArgs<Kind>& args, int token, int head) {
  constexpr int kDim = Kind::kHeadDim, kLaneElements = kDim / kWarpThreads;
  const int s = sequence_of(token, args.cu_q, args.batch), lane = lane_index();
  const int kv_head = head / args.group();
  const int64_t row = static_cast<int64_t>(token) * args.heads + head;
  const int end = args.kv_lens[s] - (args.cu_q[s + 1] - token) + 1;  // of the visible tokens
  const int begin = Kind::kWindow ? max(end - args.window, 0) : 0;

  float q[kLaneElements], values[kLaneElements] = {}, row_max = -kInfinity, row_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    q[i] = to_float(args.q[row * kDim + lane + i * kWarpThreads]);
  }
  for (int t = begin; t < end; ++t) {
    const int64_t page =
        args.block_table[static_cast<int64_t>(s) * args.table_width + t / Kind::kPageSize];
    const int64_t cache_row =
        (page * Kind::kPageSize + t % Kind::kPageSize) * args.kv_heads + kv_head;
    const int64_t scale = (Kind::kScales == Scales::kPage ? page * args.kv_heads : 0) + kv_head;
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      dot += q[i] * cached_value<Kind>(args.k_cache, args.k_block_scale, cache_row,
                                       lane + i * kWarpThreads);
    }
    float score = warp_sum(dot) * args.sm_scale;
    if constexpr (Kind::kScales != Scales::kNone) score *= args.k_scale[scale];
    if constexpr (Kind::kSoftcap) score = args.softcap * tanhf(score / args.softcap);
    score *= kLog2E;

    const float new_max = fmaxf(row_max, score);
    const float rescale = rescale_factor(row_max, new_max), weight = fast_exp2(score - new_max);
    row_max = new_max;
    row_sum = row_sum * rescale + weight;
    float value_factor = weight;
    if constexpr (Kind::kScales != Scales::kNone) value_factor *= args.v_scale[scale];
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const float v =
          cached_value<Kind>(args.v_cache, args.v_block_scale, cache_row, lane + i * kWarpThreads);
      values[i] = values[i] * rescale + value_factor * v;
    }
  }

  RowEnd end_of_row;
  if constexpr (Kind::kSinks) {
    end_of_row = RowEnd::with_sink(row_max, row_sum, args.sinks[head]);
  } else {
    end_of_row = RowEnd::of(row_max, row_sum);
  }
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const float value = values[i] * end_of_row.factor;
    args.out[row * kDim + lane + i * kWarpThreads] = from_float<typename Kind::T>(value);
  }
  if (lane == 0) args.lse[row] = end_of_row.lse;
}

template <typename Kind>
__global__ void __launch_bounds__(128, 8) paged_attn_naive(
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
    int batch, int heads, int kv_heads, int table_width, int window, float sm_scale,
    float softcap) {
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
  const int64_t num_rows = static_cast<int64_t>(cu_q[batch]) * heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t i = first + threadIdx.x / kWarpThreads; i < num_rows; i += step) {
    attend(args, static_cast<int>(i / heads), static_cast<int>(i % heads));
  }
}

}  // namespace kernelcat
