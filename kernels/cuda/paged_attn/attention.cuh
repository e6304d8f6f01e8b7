// What a kernel of paged_attn is compiled for, and the arguments of a call.
#pragma once

#include <kernelcat/cache_scales.cuh>
#include <kernelcat/widen.cuh>

namespace kernelcat {

template <typename T>
constexpr bool kIsFloat8 = false;
template <>
constexpr bool kIsFloat8<float8_e4m3fn> = true;

template <typename T>
constexpr bool kIsNvfp4 = false;
template <>
constexpr bool kIsNvfp4<float4_e2m1fn_x2> = true;

template <typename T_, typename Cached_, int kHeadDim_, int kPageSize_, bool kWindow_,
          bool kSoftcap_, bool kSinks_, Scales kScales_>
struct AttentionKind {
  using T = T_;
  using Cached = Cached_;
  static constexpr int kHeadDim = kHeadDim_, kPageSize = kPageSize_;
  static constexpr int kRowBytes = kIsNvfp4<Cached> ? kHeadDim / 2 : kHeadDim * sizeof(Cached);
  // What products with widened keys or values must be multiplied by.
  static constexpr float kCachedFactor = kIsNvfp4<Cached> ? kNvfp4Factor : 1.0f;
  static constexpr bool kWindow = kWindow_, kSoftcap = kSoftcap_, kSinks = kSinks_;
  static constexpr Scales kScales = kScales_;
};

// Query heads h * group .. (h + 1) * group - 1 share key-value head h.
template <typename Kind>
struct AttentionArgs {
  using T = typename Kind::T;
  using Cached = typename Kind::Cached;

  const T* q;                          // (tokens, heads, head_dim)
  const Cached* k_cache;               // (pages, page_size, kv_heads, head_dim; NVFP4: half of it)
  const Cached* v_cache;               // as k_cache
  const int* block_table;              // (batch, table_width)
  const int* kv_lens;                  // (batch,)
  const int* cu_q;                     // (batch + 1,)
  const float* sinks;                  // (heads,) or null
  const float* k_scale;                // (1 or pages, kv_heads) or null
  const float* v_scale;                // (1 or pages, kv_heads) or null
  const float8_e4m3fn* k_block_scale;  // (pages, page_size, kv_heads, head_dim / 16) or null
  const float8_e4m3fn* v_block_scale;  // as k_block_scale
  T* out;                              // (tokens, heads, head_dim)
  float* lse;                          // (tokens, heads)
  int batch, heads, kv_heads, table_width;
  int window;      // visible tokens of a query, itself included
  float sm_scale;  // of scores, before softcap
  float softcap;   // scores become softcap * tanh(score / softcap)

  __device__ __forceinline__ int group() const { return heads / kv_heads; }
};

}  // namespace kernelcat
