// What a kernel of paged_attn is compiled for, and the tensors it is given.
#pragma once

#include "nvfp4.cuh"

namespace kernelcat {

enum class Scales { kNone, kHead, kPage };  // whom keys and values share a scale with

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
  // Of what tiles of NVFP4 make (widen.cuh).
  static constexpr float kGrowth = kIsNvfp4<Cached> ? 128.0f : 1.0f;
  static constexpr bool kWindow = kWindow_, kSoftcap = kSoftcap_, kSinks = kSinks_;
  static constexpr Scales kScales = kScales_;
};

// Query heads h * group .. (h + 1) * group - 1 share key-value head h.
template <typename Kind>
struct Attention {
  using T = typename Kind::T;
  using Cached = typename Kind::Cached;

  const T* q;              // (tokens, heads, head_dim)
  const Cached* k_cache;   // (pages, page_size, kv_heads, head_dim, or half of it in NVFP4)
  const Cached* v_cache;   // the same
  const int* block_table;  // (batch, table_width)
  const int* kv_lens;      // (batch,)
  const int* cu_q;         // (batch + 1,)
  const float* sinks;      // (heads,) or null
  const float* k_scale;    // (1 or pages, kv_heads) or null
  const float* v_scale;    // the same
  const float8_e4m3fn* k_block_scale;  // (pages, page_size, kv_heads, head_dim / 16) or null
  const float8_e4m3fn* v_block_scale;  // the same
  T* out;                              // (tokens, heads, head_dim)
  float* lse;                          // (tokens, heads)
  int batch, heads, kv_heads, table_width;
  int window;      // tokens a query sees, itself included
  float sm_scale;  // of scores; then they are bounded by softcap
  float softcap;

  __device__ __forceinline__ int group() const { return heads / kv_heads; }
};

}  // namespace kernelcat
