// The rows of a row tile: where they lie in q and out, and how they are stored.
#pragma once

#include <kernelcat/partial_sum.cuh>

#include "attention.cuh"

namespace kernelcat {

// The rows of a row tile in q and out.
template <typename Kind>
struct TileRows {
  using T = typename Kind::T;
  int64_t first_query;     // of the sequence, among all query tokens
  int first_row, kv_head;  // first_row: of the tile, among the rows of the sequence and head

  // The same rows of another key-value head.
  __device__ __forceinline__ TileRows of_head(int offset) const {
    return {.first_query = first_query, .first_row = first_row, .kv_head = kv_head + offset};
  }

  // Index of a row's (token, head) in q and out.
  __device__ __forceinline__ int64_t index(const AttentionArgs<Kind>& args, int row) const {
    const int group = args.group(), query = (first_row + row) / group;
    return (first_query + query) * args.heads + kv_head * group + (first_row + row) % group;
  }

  // Stores four columns of a row, and the row's lse with the first four.
  __device__ __forceinline__ void store(const AttentionArgs<Kind>& args, int row, int column,
                                        const PartialSum& sum) const {
    const int64_t out_row = index(args, row);
    RowEnd end;
    if constexpr (Kind::kSinks) {
      end = RowEnd::with_sink(sum.row_max, sum.row_sum, __ldg(args.sinks + out_row % args.heads));
    } else {
      end = RowEnd::of(sum.row_max, sum.row_sum);
    }
    store(args, out_row, column, sum, end);
  }

  // The same for a row whose index and end are known.
  __device__ __forceinline__ void store(const AttentionArgs<Kind>& args, int64_t out_row,
                                        int column, const PartialSum& sum, RowEnd end) const {
    if (column == 0) args.lse[out_row] = end.lse;
    if constexpr (Kind::kScales == Scales::kHead) end.factor *= __ldg(args.v_scale + kv_head);
    end.factor *= Kind::kCachedFactor;
    const uint2 four = {pack<T>(sum.values.x * end.factor, sum.values.y * end.factor),
                        pack<T>(sum.values.z * end.factor, sum.values.w * end.factor)};
    *reinterpret_cast<uint2*>(args.out + out_row * Kind::kHeadDim + column) = four;
  }
};

}  // namespace kernelcat
