// One warp for each query token and head: neighbouring lanes take neighbouring elements of a row,
// tokens come one after another, and the online softmax is rescaled at each of them.
#include <kernelcat/sequences.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/warp_sum.cuh>

#include "latent.cuh"

namespace kernelcat {

constexpr int kLaneElements = kRowElements / kWarpThreads;
constexpr int kLaneLatents = kLatent / kWarpThreads;

// Elements lane, lane + 32 ... of a row.
template <typename T>
__device__ __forceinline__ void load_row(float (&row)[kLaneElements], const T* cache,
                                         int64_t slot) {
  const T* source = cache + slot * kRowElements + lane_index();
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) row[i] = to_float(source[i * kWarpThreads]);
}

__device__ __forceinline__ void load_row(float (&row)[kLaneElements], const PackedRow* cache,
                                         int64_t slot) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(cache) + slot * PackedRow::kBytes;
  const auto* latents = reinterpret_cast<const float8_e4m3fn*>(bytes) + lane_index();
  const auto* scales = reinterpret_cast<const float*>(bytes + PackedRow::kScalesAt);
  const auto* rope = reinterpret_cast<const bfloat16*>(bytes + PackedRow::kRopeAt) + lane_index();
#pragma unroll
  for (int i = 0; i < kLaneLatents; ++i) {
    row[i] = to_float(latents[i * kWarpThreads]) * scales[i * kWarpThreads / kScaleGroup];
  }
#pragma unroll
  for (int i = kLaneLatents; i < kLaneElements; ++i) {
    row[i] = to_float(rope[(i - kLaneLatents) * kWarpThreads]);
  }
}

template <typename T, typename Cached>
__device__ __forceinline__ void attend(const LatentArgs<T, Cached>& args, int page_bits, int token,
                                       int head) {
  const int s = sequence_of(token, args.cu_q, args.batch), lane = lane_index();
  const int* table = args.block_table + static_cast<int64_t>(s) * args.table_width;
  const int64_t row = static_cast<int64_t>(token) * args.heads + head;
  const int end = args.kv_lens[s] - (args.cu_q[s + 1] - token) + 1;  // of the visible tokens

  float q[kLaneElements], values[kLaneLatents] = {}, row_max = -kInfinity, row_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    q[i] = to_float(args.q[row * kRowElements + lane + i * kWarpThreads]);
  }
  for (int t = 0; t < end; ++t) {
    const int64_t page = table[t >> page_bits];
    float elements[kLaneElements], dot = 0.0f;
    load_row(elements, args.kv_cache, (page << page_bits) + (t & ((1 << page_bits) - 1)));
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) dot += q[i] * elements[i];
    const float score = warp_sum(dot) * args.sm_scale * kLog2E, new_max = fmaxf(row_max, score);
    const float rescale = rescale_factor(row_max, new_max), weight = fast_exp2(score - new_max);
    row_max = new_max;
    row_sum = row_sum * rescale + weight;
#pragma unroll
    for (int i = 0; i < kLaneLatents; ++i) values[i] = values[i] * rescale + weight * elements[i];
  }

  const RowEnd row_end = RowEnd::of(row_max, row_sum);
#pragma unroll
  for (int i = 0; i < kLaneLatents; ++i) {
    args.out[row * kLatent + lane + i * kWarpThreads] = from_float<T>(values[i] * row_end.factor);
  }
  if (lane == 0) args.lse[row] = row_end.lse;
}

template <typename T, typename Cached>
__global__ void __launch_bounds__(128)
    flashmla_naive(const T* q,              // (tokens, heads, 576)
                   const Cached* kv_cache,  // (pages, page_size, 576), or PackedRows
                   const int* block_table,  // (batch, table_width)
                   const int* kv_lens,      // (batch,)
                   const int* cu_q,         // (batch + 1,)
                   T* out,                  // (tokens, heads, 512)
                   float* lse,              // (tokens, heads)
                   int batch, int heads, int table_width, float sm_scale, int page_bits) {
  const LatentArgs<T, Cached> args = {.q = q,
                                      .kv_cache = kv_cache,
                                      .block_table = block_table,
                                      .kv_lens = kv_lens,
                                      .cu_q = cu_q,
                                      .out = out,
                                      .lse = lse,
                                      .batch = batch,
                                      .heads = heads,
                                      .table_width = table_width,
                                      .sm_scale = sm_scale};
  const int64_t num_rows = static_cast<int64_t>(cu_q[batch]) * heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t i = first + threadIdx.x / kWarpThreads; i < num_rows; i += step) {
    attend(args, page_bits, static_cast<int>(i / heads), static_cast<int>(i % heads));
  }
}

}  // namespace kernelcat
