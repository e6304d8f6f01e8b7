// One warp a query token and head: lanes side by side on a row, one token after another, and a
// softmax that is rescaled whenever a larger score turns up.
#include <kernelcat/sequences.cuh>
#include <kernelcat/sync.cuh>
#include <kernelcat/warp_sum.cuh>

#include "latent.cuh"

namespace kernelcat {

constexpr int kHeld = kRowElements / kWarpThreads;  // elements of a row that a lane has
constexpr int kHeldLatents = kLatent / kWarpThreads;

// Elements lane, lane + 32 ... of a row.
template <typename T>
__device__ __forceinline__ void load_row(float (&row)[kHeld], const T* cache, int64_t slot) {
  const T* source = cache + slot * kRowElements + lane_index();
#pragma unroll
  for (int i = 0; i < kHeld; ++i) row[i] = to_float(source[i * kWarpThreads]);
}

__device__ __forceinline__ void load_row(float (&row)[kHeld], const PackedRow* cache,
                                         int64_t slot) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(cache) + slot * PackedRow::kBytes;
  const auto* latents = reinterpret_cast<const float8_e4m3fn*>(bytes) + lane_index();
  const auto* scales = reinterpret_cast<const float*>(bytes + PackedRow::kScalesAt);
  const auto* rope = reinterpret_cast<const bfloat16*>(bytes + PackedRow::kRopeAt) + lane_index();
#pragma unroll
  for (int i = 0; i < kHeldLatents; ++i) {
    row[i] = to_float(latents[i * kWarpThreads]) * scales[i * kWarpThreads / kScaleGroup];
  }
#pragma unroll
  for (int i = kHeldLatents; i < kHeld; ++i) {
    row[i] = to_float(rope[(i - kHeldLatents) * kWarpThreads]);
  }
}

template <typename T, typename Cached>
__device__ __forceinline__ void attend(const LatentAttention<T, Cached>& call, int page_bits,
                                       int token, int head) {
  const int s = sequence_of(token, call.cu_q, call.batch), lane = lane_index();
  const int* table = call.block_table + static_cast<int64_t>(s) * call.table_width;
  const int64_t place = static_cast<int64_t>(token) * call.heads + head;
  const int end = call.kv_lens[s] - (call.cu_q[s + 1] - token) + 1;  // of the tokens it sees

  float q[kHeld], sum[kHeldLatents] = {}, most = -kInfinity, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    q[i] = to_float(call.q[place * kRowElements + lane + i * kWarpThreads]);
  }
  for (int t = 0; t < end; ++t) {
    const int64_t page = table[t >> page_bits];
    float row[kHeld], dot = 0.0f;
    load_row(row, call.kv_cache, (page << page_bits) + (t & ((1 << page_bits) - 1)));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) dot += q[i] * row[i];
    const float score = warp_sum(dot) * call.sm_scale * kLog2E, new_most = fmaxf(most, score);
    const float kept = rescale_factor(most, new_most), weight = fast_exp2(score - new_most);
    most = new_most;
    total = total * kept + weight;
#pragma unroll
    for (int i = 0; i < kHeldLatents; ++i) sum[i] = sum[i] * kept + weight * row[i];
  }

  const RowEnd result = RowEnd::of(most, total);
#pragma unroll
  for (int i = 0; i < kHeldLatents; ++i) {
    call.out[place * kLatent + lane + i * kWarpThreads] = from_float<T>(sum[i] * result.factor);
  }
  if (lane == 0) call.lse[place] = result.lse;
}

template <typename T, typename Cached>
__global__ void __launch_bounds__(128)
    flashmla_naive(const T* q, const Cached* kv_cache, const int* block_table, const int* kv_lens,
                   const int* cu_q, T* out, float* lse, int batch, int heads, int table_width,
                   float sm_scale, int page_bits) {
  const LatentAttention<T, Cached> call = {q,   kv_cache, block_table, kv_lens,     cu_q,    out,
                                           lse, batch,    heads,       table_width, sm_scale};
  const int64_t num_rows = static_cast<int64_t>(cu_q[batch]) * heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t i = first + threadIdx.x / kWarpThreads; i < num_rows; i += step) {
    attend(call, page_bits, static_cast<int>(i / heads), static_cast<int>(i % heads));
  }
}

}  // namespace kernelcat
