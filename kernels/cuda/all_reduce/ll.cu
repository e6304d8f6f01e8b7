// Every element travels with a flag: no signals and no barriers, for twice the bytes on the wire.
#include <kernelcat/pair_sums.cuh>
#include <kernelcat/pdl.cuh>
#include <kernelcat/window.cuh>

namespace kernelcat {

// The words of all ranks, once each has its flag; this rank's is `mine`. Returns the first rank
// that did not answer, or -1.
template <int kRanks>
__device__ __forceinline__ int wait_for_words(uint2 (&parts)[kRanks], uint2 mine, const Window* own,
                                              int rank, int word, uint32_t epoch) {
  Patience patience;
  while (true) {
    int missing = -1;
#pragma unroll
    for (int i = kRanks - 1; i >= 0; --i) {
      const FlaggedWord found = load_flagged(&own->words[epoch % 2][i][word]);
      const bool is_mine = i == rank;
      parts[i] = {is_mine ? mine.x : found.low, is_mine ? mine.y : found.high};
      if (!is_mine && (found.low_flag != epoch || found.high_flag != epoch)) missing = i;
    }
    if (missing < 0 || patience.is_over()) return missing;
  }
}

template <typename T, int kRanks, int kThreads, bool kDependentLaunch>
__global__ void __launch_bounds__(kThreads, 2)
    all_reduce_ll(const T* x,  // (num_elements,)
                  T* out,      // (num_elements,)
                  int num_elements, int rank, Window* window0, Window* window1, Window* window2,
                  Window* window3, Window* window4, Window* window5, Window* window6,
                  Window* window7) {
  const Windows<kRanks> windows{
      {window0, window1, window2, window3, window4, window5, window6, window7}, rank};
  Window* own = windows.of[0];
  if constexpr (kDependentLaunch) {
    grid_dependency_wait();
    launch_dependents();
  }
  // The three loads are under way together.
  const uint2* words = reinterpret_cast<const uint2*>(x);
  const int num_words = num_elements / 4, step = gridDim.x * kThreads;
  int word = blockIdx.x * kThreads + threadIdx.x;
  uint2 next = word < num_words ? words[word] : uint2{};
  const uint32_t epoch = begin_epoch(own);
  if (has_failed(own)) return;
  const int half = epoch % 2;
  for (; word < num_words; word += step) {
    uint2 parts[kRanks];
    const uint2 mine = next;
    if (word + step < num_words) next = words[word + step];
#pragma unroll
    for (int shift = 1; shift < kRanks; ++shift) {
      store_flagged(&windows.of[shift]->words[half][rank][word], mine, epoch);
    }
    const int missing = wait_for_words(parts, mine, own, rank, word, epoch);
    if (missing >= 0) {
      report_missing(own, missing);
      break;
    }
    PairSums<T, 2> sum;
    sum.start(parts[0]);
#pragma unroll
    for (int i = 1; i < kRanks; ++i) sum.add(parts[i]);
    reinterpret_cast<uint2*>(out)[word] = {sum.rounded(0), sum.rounded(1)};
  }
  end_epoch(own, epoch);
}

}  // namespace kernelcat
