// Sums over the ranks that serve a token, in float32 and in the order of the ranks, rounded once.
#pragma once

#include <kernelcat/move_vectors.cuh>
#include <kernelcat/pair_sums.cuh>
#include <kernelcat/window.cuh>

namespace kernelcat {

// What a thread block works on: the weighted sums of each rank's experts.
template <typename T, int kRanks, int kThreads>
struct ExpertSums {
  // Vectors of a token that a thread moves or adds up at once.
  static constexpr int kUnroll = kRanks == 2 ? 4 : kRanks <= 4 ? 2 : 1;
  static constexpr int kParts = kUnroll * kRanks;

  const uint4* sums;      // (kRanks * num_tokens, num_vectors)
  const int* row_of;      // (kRanks, num_tokens)
  const int* expert_ids;  // (num_tokens, top_k)
  const uint4* residual;  // (num_tokens, num_vectors), or null
  uint4* out;             // (num_tokens, num_vectors)
  Windows<kRanks> windows;
  uint32_t epoch;
  int num_tokens, num_vectors, top_k, local_experts;

  __device__ __forceinline__ const uint4* row_vectors(int row) const {
    return sums + static_cast<int64_t>(row) * num_vectors;
  }

  // Gives the vectors of a row to `send(place, vector)`. All threads call this together.
  template <typename Send>
  __device__ __forceinline__ void send_row(int row, Send send) const {
    const uint4* vectors = row_vectors(row);
    move_vectors<kThreads, kUnroll>(num_vectors, [&](int at) { return vectors[at]; }, send);
  }

  // Adds up a token, of which this rank holds row `own_row`, or -1; `ranks` has a bit for each rank
  // that serves the token. `take(parts, first)` fills in what has come from the other ranks:
  // part i * kRanks + source is vector first + i * kThreads of rank `source`. All threads call this
  // together.
  template <typename Take>
  __device__ __forceinline__ void add_up(int token, uint32_t ranks, int own_row, Take take) const {
    const int64_t row = static_cast<int64_t>(token) * num_vectors;
    const uint4* own_sums = row_vectors(own_row);
    for (int first = threadIdx.x; first < num_vectors; first += kUnroll * kThreads) {
      uint4 parts[kParts] = {}, mine[kUnroll] = {}, added[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int at = first + i * kThreads;
        if (at >= num_vectors) continue;
        added[i] = residual ? residual[row + at] : uint4{};
        if (own_row >= 0) mine[i] = own_sums[at];
      }
      take(parts, first);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int at = first + i * kThreads;
        if (at >= num_vectors) continue;
        out[row + at] = rounded_sum(parts + i * kRanks, mine[i], ranks, added[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ uint4 rounded_sum(const uint4* parts,  // (kRanks,), of the others
                                               const uint4& mine, uint32_t ranks,
                                               const uint4& added) const {
    PairSums<T, 4> sum;
    sum.start(added);
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      if (ranks >> i & 1) sum.add(select(i == windows.rank, mine, parts[i]));
    }
    return rounded_vector(sum);
  }
};

}  // namespace kernelcat
