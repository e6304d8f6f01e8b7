// One warp for each part of a row: 128 latent values that share a scale, or the pairs of the
// rotated part. Neighbouring lanes take neighbouring elements.
#include "cached_row.cuh"

namespace kernelcat {

template <typename T, typename Cached, RopeStyle kStyle>
__global__ void __launch_bounds__(128)
    mla_kv_write_naive(const T* c,              // (tokens, 512)
                       const T* k_pe,           // (tokens, 64)
                       const int* block_table,  // (batch, table_width)
                       const int* kv_lens,      // (batch,)
                       const int* cu_q,         // (batch + 1,)
                       const float* cos_sin,    // (positions, rotary_dim)
                       uint8_t* kv_cache,       // (pages, page_size, bytes of a row)
                       int tokens, int batch, int table_width, int page_bits, int rotary_dim) {
  using Row = CachedRow<Cached>;
  using Latent = typename Row::Latent;
  constexpr int kParts = kRowScales + 1, kRopePart = kRowScales;
  constexpr int kLaneElements = kScaleGroup / kWarpThreads;
  const TokenSlots slots = {.block_table = block_table,
                            .kv_lens = kv_lens,
                            .cu_q = cu_q,
                            .batch = batch,
                            .table_width = table_width,
                            .page_bits = page_bits};
  const int64_t num_parts = static_cast<int64_t>(tokens) * kParts;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads);
  const int lane = lane_index();
  for (int64_t i = begin + warp_index(); i < num_parts; i += step) {
    const int token = static_cast<int>(i / kParts), part = static_cast<int>(i % kParts);
    const int sequence = slots.sequence(token), position = slots.position(token, sequence);
    const Row row(kv_cache, slots.slot(slots.page(sequence, position), position));
    if (part == kRopePart) {
      const T* source = k_pe + static_cast<int64_t>(token) * kRope;
      const int first = first_of_pair<kStyle>(lane), second = first + kPairDistance<kStyle>;
      float2 pair = {to_float(source[first]), to_float(source[second])};
      if (rotary_dim != 0) {
        const float* angles = cos_sin + static_cast<int64_t>(position) * kRope;
        pair = rotated(pair, angles[lane], angles[kRope / 2 + lane]);
      }
      T* target = reinterpret_cast<T*>(row.rope());
      target[first] = from_float<T>(pair.x);
      target[second] = from_float<T>(pair.y);
      continue;
    }
    const T* source = c + static_cast<int64_t>(token) * kLatent + part * kScaleGroup;
    float values[kLaneElements], amax = 0.0f;
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      values[j] = to_float(source[lane + j * kWarpThreads]);
      amax = fmaxf(amax, fabsf(values[j]));
    }
    float inverse = 1.0f;
    if constexpr (Row::kPacked) {
      const float scale = scale_of(max_of_lanes<kWarpThreads>(amax));
      inverse = inverse_power_of_two(scale);
      if (lane == 0) row.scales()[part] = scale;
    }
    Latent* target = row.latents() + part * kScaleGroup;
#pragma unroll
    for (int j = 0; j < kLaneElements; ++j) {
      target[lane + j * kWarpThreads] = from_float<Latent>(values[j] * inverse);
    }
  }
}

}  // namespace kernelcat
