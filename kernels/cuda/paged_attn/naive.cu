// One warp a query token and head: lanes side by side on head_dim, one key after another, and a
// softmax that is rescaled whenever a larger score turns up.
#include <kernelcat/softmax.cuh>
#include <kernelcat/sync.cuh>

#include "attention.cuh"

namespace kernelcat {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = kWarpThreads / 2; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, mask);
  }
  return value;
}

// The sequence that query `token` belongs to: the last that begins no later.
__device__ __forceinline__ int sequence_of(int token, const int* cu_q, int batch) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_q[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Element `column` of a row of head_dim elements.
template <typename Kind>
__device__ __forceinline__ float cached_value(const typename Kind::Cached* cache,
                                              const float8_e4m3fn* block_scale, int64_t row,
                                              int column) {
  const int64_t at = row * Kind::kHeadDim + column;
  if constexpr (kIsNvfp4<typename Kind::Cached>) {
    return to_float(cache[at / 2], column % 2) * to_float(block_scale[at / kScaledValues]);
  } else {
    return to_float(cache[at]);
  }
}

template <typename Kind>
__device__ __forceinline__ void attend(const Attention<Kind>& call, int token, int head) {
  constexpr int kDim = Kind::kHeadDim, kPerLane = kDim / kWarpThreads;
  const int s = sequence_of(token, call.cu_q, call.batch), lane = lane_index();
  const int kv_head = head / call.group();
  const int64_t row = static_cast<int64_t>(token) * call.heads + head;
  const int end = call.kv_lens[s] - (call.cu_q[s + 1] - token) + 1;  // of the tokens it sees
  const int begin = Kind::kWindow ? max(end - call.window, 0) : 0;

  float q[kPerLane], sum[kPerLane] = {}, most = -kInfinity, total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    q[i] = to_float(call.q[row * kDim + lane + i * kWarpThreads]);
  }
  for (int t = begin; t < end; ++t) {
    const int64_t page =
        call.block_table[static_cast<int64_t>(s) * call.table_width + t / Kind::kPageSize];
    const int64_t cached = (page * Kind::kPageSize + t % Kind::kPageSize) * call.kv_heads + kv_head;
    const int64_t scaled = (Kind::kScales == Scales::kPage ? page * call.kv_heads : 0) + kv_head;
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      dot += q[i] *
             cached_value<Kind>(call.k_cache, call.k_block_scale, cached, lane + i * kWarpThreads);
    }
    float score = warp_sum(dot) * call.sm_scale;
    if constexpr (Kind::kScales != Scales::kNone) score *= call.k_scale[scaled];
    if constexpr (Kind::kSoftcap) score = call.softcap * tanhf(score / call.softcap);
    score *= kLog2E;

    const float new_most = fmaxf(most, score);
    const float kept = rescale_factor(most, new_most), weight = fast_exp2(score - new_most);
    most = new_most;
    total = total * kept + weight;
    float of_value = weight;
    if constexpr (Kind::kScales != Scales::kNone) of_value *= call.v_scale[scaled];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float v =
          cached_value<Kind>(call.v_cache, call.v_block_scale, cached, lane + i * kWarpThreads);
      sum[i] = sum[i] * kept + of_value * v;
    }
  }

  RowEnd result;
  if constexpr (Kind::kSinks) {
    result = RowEnd::with_sink(most, total, call.sinks[head]);
  } else {
    result = RowEnd::of(most, total);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float value = sum[i] * result.factor;
    call.out[row * kDim + lane + i * kWarpThreads] = from_float<typename Kind::T>(value);
  }
  if (lane == 0) call.lse[row] = result.lse;
}

template <typename Kind>
__global__ void __launch_bounds__(128, 8)
    paged_attn_naive(const typename Kind::T* q, const typename Kind::Cached* k_cache,
                     const typename Kind::Cached* v_cache, const int* block_table,
                     const int* kv_lens, const int* cu_q, const float* sinks, const float* k_scale,
                     const float* v_scale, const float8_e4m3fn* k_block_scale,
                     const float8_e4m3fn* v_block_scale, typename Kind::T* out, float* lse,
                     int batch, int heads, int kv_heads, int table_width, int window,
                     float sm_scale, float softcap) {
  const Attention<Kind> call = {q,        k_cache, v_cache, block_table,   kv_lens,       cu_q,
                                sinks,    k_scale, v_scale, k_block_scale, v_block_scale, out,
                                lse,      batch,   heads,   kv_heads,      table_width,   window,
                                sm_scale, softcap};
  const int64_t num_rows = static_cast<int64_t>(cu_q[batch]) * heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  for (int64_t i = first + threadIdx.x / kWarpThreads; i < num_rows; i += step) {
    attend(call, static_cast<int>(i / heads), static_cast<int>(i % heads));
  }
}

}  // namespace kernelcat
