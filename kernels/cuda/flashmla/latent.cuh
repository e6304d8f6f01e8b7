// The arguments of a call of flashmla.
#pragma once

#include <kernelcat/fp8.cuh>
#include <kernelcat/mla_row.cuh>
#include <kernelcat/softmax.cuh>

namespace kernelcat {

template <typename T, typename Cached>
struct LatentArgs {
  const T* q;              // (tokens, heads, 576)
  const Cached* kv_cache;  // (pages, page_size, 576), or (pages, page_size) of PackedRow
  const int* block_table;  // (batch, table_width)
  const int* kv_lens;      // (batch,)
  const int* cu_q;         // (batch + 1,)
  T* out;                  // (tokens, heads, 512)
  float* lse;              // (tokens, heads)
  int batch, heads, table_width;
  float sm_scale;  // of scores
};

}  // namespace kernelcat
