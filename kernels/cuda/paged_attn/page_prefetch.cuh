// Keys, values and queries of a sequence are brought into L2 while the kernels before this one
// still run. The block table and the lengths that say where they lie may still change, or hold
// anything: what they say is a hint, and every request is cut to the tensors.
#pragma once

#include <kernelcat/early_access.cuh>

#include "attention.cuh"

namespace kernelcat {

template <typename Kind, int kGroup>
struct PagePrefetch {
  const AttentionArgs<Kind>& args;
  int num_pages, num_queries;  // of the cache; of all sequences together

  // The tokens of a page lie side by side, with all their heads: a page is one request for keys and
  // one for values. The `num_blocks` thread blocks of a sequence share the pages out; `block_idx`
  // is this one's number. All threads call it.
  __device__ __forceinline__ void pages(int sequence_idx, int block_idx, int num_blocks) const {
    const int64_t first_query = load_hint(args.cu_q + sequence_idx);
    const int64_t new_tokens = load_hint(args.cu_q + sequence_idx + 1) - first_query;
    const int64_t kv_len = load_hint(args.kv_lens + sequence_idx);
    const int64_t room = static_cast<int64_t>(args.table_width) * Kind::kPageSize;
    const int end_token = clamp(kv_len, 0, room);
    const int first_token =
        Kind::kWindow ? clamp(kv_len - new_tokens + 1 - args.window, 0, end_token) : 0;
    const int first_page = first_token / Kind::kPageSize;
    const int end_page = ceil_div(end_token, Kind::kPageSize);
    const int* table = args.block_table + static_cast<int64_t>(sequence_idx) * args.table_width;
    const int stride = num_blocks * blockDim.x;
    for (int i = block_idx + num_blocks * threadIdx.x; i < 2 * (end_page - first_page);
         i += stride) {
      const int entry = first_page + i / 2, first = entry * Kind::kPageSize;
      const uint32_t page = load_hint(table + entry);
      if (page >= static_cast<uint32_t>(num_pages)) continue;
      const int begin = max(first_token - first, 0);
      const int end = min(end_token - first, Kind::kPageSize);
      const void* cache = i % 2 == 0 ? args.k_cache : args.v_cache;
      const uint32_t token_bytes = args.kv_heads * Kind::kRowBytes;
      const uint64_t slot = static_cast<uint64_t>(page) * Kind::kPageSize + begin;
      prefetch_span_l2(static_cast<const uint8_t*>(cache) + slot * token_bytes,
                       (end - begin) * token_bytes);
    }
  }

  // The queries of a key-value head, one query token a thread.
  __device__ __forceinline__ void queries(int sequence_idx, int kv_head) const {
    const int first_query = load_hint(args.cu_q + sequence_idx);
    const int end_query = min(load_hint(args.cu_q + sequence_idx + 1), num_queries);
    const int64_t query = static_cast<int64_t>(first_query) + threadIdx.x;
    if (query < 0 || query >= end_query) return;
    const int64_t row = query * args.heads + kv_head * kGroup;
    prefetch_span_l2(args.q + row * Kind::kHeadDim,
                     kGroup * Kind::kHeadDim * sizeof(typename Kind::T));
  }

 private:
  static __device__ __forceinline__ int clamp(int64_t value, int64_t low, int64_t high) {
    return static_cast<int>(min(max(value, low), high));
  }
};

}  // namespace kernelcat
