// What every kernel of latent attention is given.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/softmax.cuh>

namespace kernelcat {

constexpr int kLatent = 512, kRope = 64;  // elements of a row; the latent part is the value
constexpr int kRowElements = kLatent + kRope;
constexpr int kScaled = 128;  // latent values that share a scale, in a packed row

// A row of 656 bytes: float8 latents, their scales, bfloat16 for the rotated part.
struct Packed {
  static constexpr int kScalesAt = kLatent, kRopeAt = kScalesAt + kLatent / kScaled * 4;
  static constexpr int kBytes = kRopeAt + 2 * kRope;
};

template <typename T, typename Cached>
struct LatentAttention {
  const T* q;              // (tokens, heads, 576)
  const Cached* kv_cache;  // (pages, page_size, 576, or one Packed)
  const int* block_table;  // (batch, table_width)
  const int* kv_lens;      // (batch,)
  const int* cu_q;         // (batch + 1,)
  T* out;                  // (tokens, heads, 512)
  float* lse;              // (tokens, heads)
  int batch, heads, table_width;
  float sm_scale;  // of scores
};

}  // namespace kernelcat
