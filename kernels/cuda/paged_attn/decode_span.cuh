// A sequence, and the tokens that some query of it sees.
#pragma once

#include <kernelcat/sequences.cuh>

#include "attention.cuh"

namespace kernelcat {

struct TokenSpan {
  Sequence sequence;
  int first_token, end_token;
};

// By ordinary loads, which stay behind grid_dependency_wait(), unlike those of load_sequence().
template <typename Kind>
__device__ __forceinline__ TokenSpan visible_span(const AttentionArgs<Kind>& args,
                                                  int sequence_idx) {
  const int first_query = args.cu_q[sequence_idx];
  const int num_queries = args.cu_q[sequence_idx + 1] - first_query;
  const Sequence sequence = {.first_query = first_query,
                             .num_queries = num_queries,
                             .num_tokens = args.kv_lens[sequence_idx]};
  return {.sequence = sequence,
          .first_token = Kind::kWindow ? max(sequence.context() + 1 - args.window, 0) : 0,
          .end_token = num_queries > 0 ? max(sequence.num_tokens, 0) : 0};
}

}  // namespace kernelcat
