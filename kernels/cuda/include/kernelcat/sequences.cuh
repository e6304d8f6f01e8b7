// The sequences of a batch: where the query tokens of each begin, and how many cached tokens it
// has.
#pragma once

#include <kernelcat/types.cuh>

namespace kernelcat {

// The last `num_queries` of the sequence's `num_tokens` cached tokens are its query tokens.
struct Sequence {
  int first_query = 0, num_queries = 0, num_tokens = 0;

  // Query token i is token `context() + i` of the sequence.
  __device__ __forceinline__ int context() const { return num_tokens - num_queries; }
};

// Sequence `index` of a batch; `cu_q` is (batch + 1,), `kv_lens` (batch,).
__device__ __forceinline__ Sequence load_sequence(const int* cu_q, const int* kv_lens, int index) {
  const int first_query = __ldg(cu_q + index);
  return {.first_query = first_query,
          .num_queries = __ldg(cu_q + index + 1) - first_query,
          .num_tokens = __ldg(kv_lens + index)};
}

// The sequence that query token `token` belongs to: the last one with cu_q[s] <= token; `cu_q` is
// (batch + 1,).
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

}  // namespace kernelcat
